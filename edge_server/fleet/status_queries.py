"""Rate-limited queries for the status that the broker retains of a device."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from shared.errors import WireError
from shared.protocol import wire
from shared.protocol.messages import Status
from shared.protocol.topics import topic
from shared.runtime.clock import Clock
from shared.runtime.executor import BackgroundTasks
from shared.transport.base import Transport

MOST_QUERIES, ASK_S, ASK_AGAIN_S = 16, 5.0, 10.0
"""Concurrent queries, seconds until one times out, and seconds until it is repeated."""


@dataclass
class StatusQueries:
    """Fetches retained statuses.

    Attributes:
        receive: Handles a status that a device sent; raises WireError for an invalid one.
    """

    site: str
    transport: Transport
    clock: Clock
    receive: Callable[[str, Status], Awaitable[None]]
    tasks: BackgroundTasks = field(default_factory=BackgroundTasks)
    _asked_at: dict[str, float] = field(default_factory=dict)

    def ask(self, device: str) -> None:
        """Query a device's status in the background, unless that was done just now."""
        now = self.clock()
        asked_at = self._asked_at.get(device, -ASK_AGAIN_S)
        if now - asked_at < ASK_AGAIN_S or len(self.tasks) >= MOST_QUERIES:
            return
        self._asked_at = {name: at for name, at in self._asked_at.items() if now - at < ASK_AGAIN_S} | {device: now}
        self.tasks.start(self._fetch(device), "ask", device)

    async def _fetch(self, device: str) -> None:
        async with self.transport.subscribe(topic(self.site, device, "status")) as inbox:
            with suppress(TimeoutError, WireError):
                async with asyncio.timeout(ASK_S):
                    _, data = await anext(inbox)
                await self.receive(device, wire.decode_as(Status, data))
