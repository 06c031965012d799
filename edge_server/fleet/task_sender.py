"""Send tasks to devices; repeat until the broker accepts them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from edge_server.fleet.open_rounds import OpenRounds
from shared.errors import Unreachable
from shared.protocol import wire
from shared.protocol.topics import topic
from shared.runtime.executor import BackgroundTasks
from shared.transport.base import Transport

log = logging.getLogger(__name__)

CONNECT_S = 3.0
"""Seconds of waiting for the broker that are not worth a log message."""
GIVE_AGAIN_S, GIVE_LAST_S = 0.1, 30.0
"""Seconds between tries to send a task, at first and at most."""
MOST_AT_ONCE = 16
"""Tasks whose acknowledgement by the broker is awaited at once: below its usual limit of 20 messages in flight."""


@dataclass
class TaskSender:
    """Sends tasks of the open rounds.

    Attributes:
        broker: Set while the broker is connected; None where it cannot disconnect.
    """

    site: str
    transport: Transport
    rounds: OpenRounds
    broker: asyncio.Event | None = None
    sending: BackgroundTasks = field(default_factory=BackgroundTasks)

    async def reachable(self) -> bool:
        """Wait for the broker; return true if it was connected already."""
        if self.broker is None or self.broker.is_set():
            return True
        with suppress(TimeoutError):
            async with asyncio.timeout(CONNECT_S):
                await self.broker.wait()
                return False
        log.warning("waiting for the broker; no deadline runs meanwhile")
        await self.broker.wait()
        return False

    async def send_all(self, devices: Sequence[str]) -> None:
        """Send devices their tasks, several at once; where the broker is unreachable, in the background."""
        for start in range(0, len(devices), MOST_AT_ONCE):
            group = devices[start : start + MOST_AT_ONCE]
            for device, is_sent in zip(group, await asyncio.gather(*map(self.send, group)), strict=True):
                if not is_sent:
                    self.schedule(device)

    async def send(self, device: str) -> bool:
        """Send a device its task unless it is done; return false if the broker is unreachable."""
        open_round = self.rounds.find(device)
        if not open_round or not open_round.owes(device):
            return True
        task = open_round.tasks[device]
        try:
            await self.transport.publish(topic(self.site, device, "task"), wire.encode(task))
        except Unreachable as error:
            log.debug("task waits for the broker: %s", error)
            return False
        if task.payload:  # a device that has missed it requests frames after the next task
            open_round.tasks[device] = msgspec.structs.replace(task, payload=b"")
        return True

    async def _send_reliably(self, device: str) -> None:
        """Send a device its task, repeatedly until the broker accepts it.

        Device messages can arrive a moment before a new connection is usable, and may open a round.
        """
        pause_s = GIVE_AGAIN_S  # a lost connection may not be detected yet, or the broker denies it
        while not await self.send(device) and self.broker:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, GIVE_LAST_S)
            await self.broker.wait()

    def schedule(self, device: str) -> None:
        """Send a device its task in the background, once at a time."""
        open_round = self.rounds.find(device)
        if open_round and device in open_round.tasks and device not in self.sending:
            self.sending.start(self._send_reliably(device), "give", device)
