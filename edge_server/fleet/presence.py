"""Presence of devices: births, deaths, reports and signs of life."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec

from edge_server.fleet.state import Fleet
from shared.errors import WireError
from shared.protocol.messages import Report, Status

log = logging.getLogger(__name__)


@dataclass
class DuplicateIds:
    """Detects agents that run under one device id and disconnect each other.

    Attributes:
        count: Called for each takeover.
    """

    fleet: Fleet
    count: Callable[[], None]
    _reported: set[str] = field(default_factory=set)

    def observe(self, message: Status) -> None:
        """Count a takeover of an id; log once that it is used twice."""
        if not self.fleet.is_duplicate_id(message):
            return
        if message.device not in self._reported:
            log.warning(
                "two agents run as device %s and disconnect each other from the broker; give each board its own name",
                message.device,
            )
        self._reported.add(message.device)
        self.count()


@dataclass
class PresenceTracker:
    """Follows births and deaths.

    Attributes:
        fleet: Last known state of the devices.
        query: Queries the retained status of a device.
        follow: Called with the status of a device that came or went, and the one before it.
        changed: Set whenever the fleet changes.
        report_listeners, status_listeners: Called with every new report, and every birth or death; they must not block.
        denied: Revoked devices, whose messages are ignored.
    """

    fleet: Fleet
    duplicates: DuplicateIds
    query: Callable[[str], None]
    follow: Callable[[Status, Status | None], Awaitable[None]]
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    report_listeners: list[Callable[[Report], None]] = field(default_factory=list)
    status_listeners: list[Callable[[Status], None]] = field(default_factory=list)
    denied: frozenset[str] = frozenset()

    async def handle_status(self, device: str, status: Status) -> None:
        """Handle a device's birth or death.

        Raises:
            WireError: It is in the name of another device.
        """
        _require_own(device, status)
        self.duplicates.observe(status)
        before = self.fleet.statuses.get(device)
        if self.fleet.observe(status):
            await self._publish_change(status, before)

    async def handle_report(self, device: str, report: Report) -> None:
        """Handle a report, which may be a retained one.

        Raises:
            WireError: It is in the name of another device.
        """
        _require_own(device, report)
        if self.fleet.observe(report):
            for listener in self.report_listeners:
                listener(report)
        await self._check(device, is_proof=self.fleet.has_fresh_reports(device))

    async def note_message(self, device: str) -> None:
        """Treat a message, which is never retained, as a sign of life."""
        self.fleet.life_signs[device] += 1
        await self._check(device, is_proof=True)

    async def deny(self, devices: frozenset[str]) -> None:
        """Ignore further messages of revoked devices, and treat them and their tasks as offline."""
        new, self.denied = sorted(devices - self.denied), devices
        for device in new:
            log.warning("device %s was revoked: its messages are ignored", device)
            if (status := self.fleet.statuses.get(device)) and status.online:
                await self.handle_status(device, msgspec.structs.replace(status, online=False))

    async def _check(self, device: str, *, is_proof: bool) -> None:
        """Correct a false death or a lost birth.

        Args:
            is_proof: Whether a message was certainly sent now, and is not a retained one.
        """
        status = self.fleet.statuses.get(device)
        if status and status.online:
            return
        if is_proof and status and (alive := self.fleet.mark_online(device)):
            log.info("device %s sends messages although its status is offline", device)
            await self._publish_change(alive, status)
        else:
            self.query(device)

    async def _publish_change(self, after: Status, before: Status | None) -> None:
        """Notify listeners that a device is online or offline."""
        self.changed.set()
        for listener in self.status_listeners:
            listener(after)
        if after.online and not (before and before.online and is_same_session(before, after)):
            log.info("device %s is here, session %d", after.device, after.session)  # brokers may deliver a birth twice
        elif before and before.online and not after.online:
            log.info("device %s is gone", after.device)
        await self.follow(after, before)


def is_same_session(before: Status, after: Status) -> bool:
    """Return true if two statuses are of one session of one agent process."""
    return (before.instance, before.session) == (after.instance, after.session)


def _require_own(device: str, message: Status | Report) -> None:
    if message.device != device:
        raise WireError(f"{type(message).__name__} in the name of {message.device[:64]!r}", reason="identity")
