"""Flood control: admit device messages within bounds; count refused ones."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from edge_server.fleet.admission import FRAMED, MOST_BYTES, Admission
from edge_server.fleet.subscriptions import Subscriptions
from shared.errors import WireError
from shared.protocol.topics import ANY, is_name, parse_channel, parse_device, topic
from shared.runtime.clock import Clock
from shared.transport.base import Delivery, Transport
from shared.transport.packet_limit import MOST_RECEIVED_BYTES

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FloodLimits:
    """Bounds of what is received.

    Attributes:
        window_bytes: Most bytes of frames that are requested from a device at once; bounds its queue.
        closed_topics: Topics closed to flooding devices; the transport reads them.
        longest_bytes: Length of the largest accepted packet.
        channels: Accepted channels, with the longest message of each.
    """

    window_bytes: int
    closed_topics: set[bytes] = field(default_factory=set)
    longest_bytes: int = MOST_RECEIVED_BYTES
    channels: Mapping[str, int] = field(default_factory=lambda: MOST_BYTES)


class FloodControl:
    """Receives device messages; without limits, as in a replay, all of them.

    Args:
        awaits: Returns true if frames of a device are expected on a channel.
        list_devices: Returns the devices seen so far.
        takes: Returns true for participants; few messages are accepted from other devices.

    Attributes:
        refused: Counts of refused messages by reason, since the last `take_refused`.
    """

    def __init__(  # noqa: PLR0913 - the ends that it connects
        self,
        site: str,
        transport: Transport,
        clock: Clock,
        *,
        awaits: Callable[[str, str], bool],
        list_devices: Callable[[], Iterable[str]],
        limits: FloodLimits | None,
        takes: Callable[[str], bool] = lambda _device: True,
    ) -> None:
        self._site, self._transport, self._awaits, self._list_devices = site, transport, awaits, list_devices
        self.refused = Counter[str]()
        self.limits, self.admission = limits, None
        if limits:
            self.admission = Admission(
                clock, self._count_refused, window_bytes=limits.window_bytes, takes=takes, channels=limits.channels
            )

    @asynccontextmanager
    async def subscribe(self) -> AsyncIterator[AsyncIterable[Delivery]]:
        """Subscribe to the devices' channels; yield the admitted messages."""
        site, transport = self._site, self._transport
        if self.admission is None or self.limits is None:
            async with transport.subscribe(*(topic(site, ANY, channel) for channel in MOST_BYTES)) as inbox:
                yield inbox
            return
        closed_topics = self.limits.closed_topics
        async with Subscriptions(transport, site, self.admission, self._list_devices, closed_topics).open():
            yield self.admission.queue

    async def dispatch(
        self, source: AsyncIterable[Delivery], handle: Callable[[str, str, bytes], Awaitable[bool]]
    ) -> None:
        """Handle messages until cancelled; count those that were of no use.

        Args:
            handle: Handles data of a device on a channel; returns true if it was of use, or raises WireError.
        """
        async for name, data in source:
            device, channel = parse_device(name), parse_channel(name)
            if not is_name(device):
                continue  # own topics
            try:
                if await handle(device, channel, data):
                    continue
            except WireError as error:
                self.refuse(device, error)
            if self.admission:
                self.admission.count_useless(device, channel, len(data))

    def admits(self, name: str, size: int) -> bool:
        """Return true if a payload of `size` bytes may be received; longer ones must be expected frames."""
        device, channel = parse_device(name), parse_channel(name)
        if self.admission is None or self.limits is None:
            return True
        if size <= self.limits.channels.get(channel, MOST_BYTES["status"]):
            return True
        is_awaited = size <= self.limits.longest_bytes and self._awaits(device, channel)
        is_awaited = is_awaited and channel in FRAMED and self.admission.queue.has_room(device, size)
        if not is_awaited:
            self.admission.count_useless(device, channel, size)
        return is_awaited

    def refuse(self, device: str, error: WireError) -> None:
        """Count a refused message, and receive less from its device."""
        self._count_refused(device, error)
        if self.admission:
            self.admission.penalize(device)

    def _count_refused(self, device: str, error: WireError) -> None:
        """Count a refused message; log it once per reason and round."""
        if not self.refused[error.reason]:
            log.warning("refused a message of %s (%s): %s", device, error.reason, error)
        self.refused[error.reason] += 1

    def take_refused(self) -> Counter[str]:
        """Return and reset the counts of refused messages."""
        refused, self.refused = self.refused, Counter()
        return refused
