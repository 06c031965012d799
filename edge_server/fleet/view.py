"""A look at a site's broker: hears what it has retained of the devices, as a client of no name that says nothing.

One row a device: what the broker says of it, joined with what the site's history has kept.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import msgspec

from edge_server.fleet.state import Fleet
from edge_server.journal.report_history import KeptReport
from shared.errors import Unreachable, WireError
from shared.protocol import wire
from shared.protocol.clip import clip_releases
from shared.protocol.inference.rollout import ModelStatus, Releases
from shared.protocol.measurements import Absent, Reading, Spent
from shared.protocol.messages import Report, Status
from shared.protocol.topics import ANY, is_name, parse_device, topic
from shared.runtime.clock import utc_seconds
from shared.runtime.executor import background
from shared.transport.base import Broker, Inbox
from shared.transport.mqtt import MqttTransport

log = logging.getLogger(__name__)

CONNECT_S = 5.0
QUIET_S, LISTEN_S = 0.3, 5.0
"""All that was retained has come after this long without anything, or after this long."""


@dataclass
class Look:
    """What was heard of a site's devices.

    Attributes:
        heard_now: Calendar seconds of the reports that were made while we listened.
        models: What each device serves.
    """

    fleet: Fleet = field(default_factory=Fleet)
    heard_now: dict[str, float] = field(default_factory=dict)
    models: dict[str, tuple[ModelStatus, ...]] = field(default_factory=dict)
    is_settled: bool = False

    def take(self, name: str, data: bytes) -> None:
        """Take what came on a topic; what cannot be used is for the server to report."""
        device = parse_device(name)
        if not is_name(device) or not data:
            return
        try:
            message = wire.decode(data)
        except WireError as error:
            log.debug("%s: %s", name, error)
            return
        if not isinstance(message, Status | Report | Releases) or message.device != device:
            return
        if isinstance(message, Releases):
            self.models[device] = clip_releases(message).models
            return
        if self.fleet.observe(message) and isinstance(message, Report):
            self.heard_now.pop(device, None)
            if self.is_settled:
                self.heard_now[device] = utc_seconds()


@asynccontextmanager
async def connected_look(broker: Broker, site: str) -> AsyncIterator[MqttTransport]:
    """Connect as a client of no name while the block lasts.

    Raises:
        Unreachable: There is no broker.
    """
    quiet = msgspec.structs.replace(broker, session_expiry_s=0)
    transport = MqttTransport(quiet, f"{site}.look.{uuid.uuid4().hex[:12]}")
    async with transport.running():
        try:
            async with asyncio.timeout(CONNECT_S):
                await transport.connected.wait()
        except TimeoutError:
            raise Unreachable(f"no broker answers at {broker.host}:{broker.port}") from None
        yield transport


async def take_retained(inbox: Inbox, take: Callable[[str, bytes], None]) -> None:
    """Take what a broker has retained of a new subscription."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LISTEN_S):
            while True:
                async with asyncio.timeout(QUIET_S):
                    take(*await anext(inbox))


@asynccontextmanager
async def watch_site(broker: Broker, site: str) -> AsyncIterator[Look]:
    """Listen while the block lasts; it begins when what the broker has retained is there.

    Raises:
        Unreachable: There is no broker.
    """
    look = Look()
    async with connected_look(broker, site) as transport:
        patterns = (topic(site, ANY, channel) for channel in ("status", "report", "release"))
        async with transport.subscribe(*patterns) as inbox:
            await take_retained(inbox, look.take)
            look.is_settled = True
            async with background(_hear(look, inbox)):
                yield look


async def _hear(look: Look, inbox: Inbox) -> None:
    async for name, data in inbox:
        look.take(name, data)


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One device of a site.

    Attributes:
        online: None where no broker was asked, or it holds no word of the device.
        heard_utc_s: Calendar seconds at which a server, or this process, first heard its last report; None where
            neither did: the broker, which keeps that report, does not say since when.
        age_s: Seconds since then.
        at: The report's own time, in seconds of the device's monotonic clock.
        models: What it serves, and what came of the last offer of each.
    """

    device: str
    online: bool | None
    heard_utc_s: float | None = None
    age_s: float | None = None
    at: float | None = None
    board: str = ""
    readings: dict[str, Reading] = {}
    absent: dict[str, Absent] = {}
    facts: dict[str, str] = {}
    spent: Spent | None = None
    models: tuple[ModelStatus, ...] = ()

    def lack(self, name: str) -> Absent | None:
        """Return why a figure is not there: its own absence or its probe's; None where nothing was said of it."""
        return self.absent.get(name) or self.absent.get(name.partition(".")[0])


def device_rows(
    fleet: Fleet | None, kept: Mapping[str, KeptReport], heard_now: Mapping[str, float], now_utc_s: float
) -> list[Device]:
    """Return the devices in order of name.

    Args:
        fleet: What the broker says; None where none was asked.
        kept: The last report of each device in the site's history.
        heard_now: Calendar seconds of those reports that came while this process listened.
        now_utc_s: Calendar seconds.
    """
    statuses, reports = (fleet.statuses, fleet.reports) if fleet else ({}, {})
    found = []
    for name in sorted(statuses.keys() | reports.keys() | kept.keys()):
        known, live = kept.get(name), reports.get(name)
        heard_utc_s = heard_now.get(name)
        if known and (live is None or _is_same(live, known.report)):
            heard_utc_s = known.heard_utc_s
        report = live or (known.report if known else None)
        found.append(_device(name, statuses.get(name), report, heard_utc_s, now_utc_s))
    return found


def _is_same(live: Report, kept: Report) -> bool:
    return (live.instance, live.at) == (kept.instance, kept.at)


def _device(
    name: str, status: Status | None, report: Report | None, heard_utc_s: float | None, now_utc_s: float
) -> Device:
    online = status.online if status else None
    if report is None:
        return Device(device=name, online=online)
    return Device(
        device=name,
        online=online,
        heard_utc_s=heard_utc_s,
        age_s=max(0.0, now_utc_s - heard_utc_s) if heard_utc_s is not None else None,
        at=report.at,
        board=report.board,
        readings=report.readings,
        absent=report.absent,
        facts=report.facts,
        spent=report.spent,
    )
