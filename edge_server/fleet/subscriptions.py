"""MQTT subscriptions of the server, by wildcard or without devices that flood."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field

from edge_server.fleet.admission import Admission
from shared.protocol.topics import ANY, topic
from shared.runtime.executor import background
from shared.transport.base import Transport

LOOK_S = 1.0
"""Seconds between updates of the device names while a channel is closed to some."""


@dataclass
class Subscriptions:
    """Subscribes an admission to all devices; while a channel is closed to one, to all others by name.

    Attributes:
        list_devices: Returns the devices seen so far.
        closed_topics: Currently closed topics; the transport reads them.
    """

    transport: Transport
    site: str
    admission: Admission
    list_devices: Callable[[], Iterable[str]]
    closed_topics: set[bytes]
    _open: dict[str, tuple[list[str], AsyncExitStack]] = field(default_factory=dict)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Keep the subscriptions during the block."""
        try:
            await self._resubscribe()
            async with background(self._watch()):
                yield
        finally:
            for _, stack in self._open.values():
                await stack.aclose()

    async def _watch(self) -> None:
        while True:
            is_closed = any(devices != [ANY] for devices, _ in self._open.values())
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S if is_closed else None):
                    await self.admission.closes.wait()
            self.admission.closes.clear()
            await self._resubscribe()

    async def _resubscribe(self) -> None:
        """Subscribe again to channels whose set of devices has changed."""
        closed = {channel: self.admission.closed_to(channel) for channel in self.admission.channels}
        topics = {topic(self.site, device, channel).encode() for channel in closed for device in closed[channel]}
        self.closed_topics.clear()
        self.closed_topics.update(topics)
        for channel, silent in closed.items():
            subscribed = sorted(set(self.list_devices()) - silent) if silent else [ANY]
            before, old_stack = self._open.get(channel, ([], AsyncExitStack()))
            if subscribed != before:
                self._open[channel] = subscribed, AsyncExitStack()
                subscribing = asyncio.create_task(self._hear(subscribed, channel, self._open[channel][1]), name="hear")
                await asyncio.sleep(0)  # subscribe before unsubscribing: no gap
                await old_stack.aclose()
                await subscribing

    async def _hear(self, devices: list[str], channel: str, stack: AsyncExitStack) -> None:
        if devices:
            names = (topic(self.site, device, channel) for device in devices)
            inbox = await stack.enter_async_context(self.transport.subscribe(*names))
            inbox.divert(self.admission.put)
