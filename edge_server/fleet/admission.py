"""Flood protection: per-device token buckets and bounded queues before decoding.

A device's messages delay those of the others by at most one of its own, and its queue has bounded memory. Messages
above its rate are dropped: an honest device repeats them.

A broker forwards faster than the server reads, and queues for one client in one queue: there other devices' messages
wait behind a flood, or are dropped. So a channel is closed to a device that sends too many useless messages on it: the
server unsubscribes from that device for a while (see `subscriptions`) and drops what is still in flight before decoding
it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shared.errors import WireError
from shared.protocol.inference.collaborative import FROM_DEVICE
from shared.protocol.topics import is_name, parse_channel, parse_device
from shared.runtime.clock import Clock
from shared.runtime.token_bucket import TokenBucket
from shared.transfer.frames import HEADER_BYTES, is_frame
from shared.transport.base import Delivery

log = logging.getLogger(__name__)

MOST_BYTES: Mapping[str, int] = {
    "status": 4 << 10,
    "report": 256 << 10,
    "want": 8 << 10,
    "update": 64 << 10,
    "features": 8 << 10,
}
"""The subscribed channels, with the longest message of each. Frames are bounded by their queue."""

FRAMED = ("update", "features", FROM_DEVICE)
PACKET_BYTES = 1 << 10
"""MQTT overhead of a payload: header and topic."""

MESSAGES, MESSAGES_PER_S = 2000.0, 1000.0
BYTES, BYTES_PER_S = float(8 << 20), float(1 << 20)
"""Burst and sustained rate of a device; a split session of small steps takes some 300 messages a second."""

RARE, RARE_PER_S = 64.0, 4.0
"""Burst and rate of a device's births, deaths and reports: each one notifies all listeners, and is logged or stored."""

SELDOM = ("status", "report")

REFUSED = 20.0
"""Price of a refused message, in messages: a device that sends only garbage is read twenty times more rarely."""

WASTED_MESSAGES, WASTED_PER_S = 512.0, 256.0
"""Burst and rate of a device's useless messages, above which a channel is closed to it. They occur by accident, too: a
window of late frames, or a hundred repeated failures of a finished run.
"""

AFTERWARDS = 32.0
"""Remaining useless messages after a closure: a flood that continues is detected after this many."""

WAITING_MESSAGES, WAITING_BYTES = 512, 256 << 20
"""Most queued messages of one device, and most queued bytes of all devices."""

MOST_DEVICES, MOST_STRANGERS = 1 << 14, 64
"""Most distinct names: where the broker permits it, anybody can connect under any number of names."""

FROM_STRANGERS = ("status", "update")
"""Channels accepted from devices outside the plan: presence, and updates of earlier runs that must be settled."""

CLOSED_S, LONGEST_CLOSED_S = 10.0, 600.0
"""Seconds for which a channel is closed to a device: doubled each time, reset after the longest without a flood."""


REPORTS_BYTES = 32 << 20
"""Bound on the last reports of all devices, in encoded bytes."""

BREATH = 64
"""Deliveries after which other tasks of the event loop run."""


def longest_packet(frame_bytes: int) -> int:
    """Return the length of the longest legitimate packet of a device, in bytes."""
    return max(frame_bytes, *MOST_BYTES.values()) + HEADER_BYTES + PACKET_BYTES


@dataclass
class _Sender:
    """Buckets and queue of one device."""

    device: str
    messages: TokenBucket
    bytes: TokenBucket
    rare: TokenBucket
    wasted: TokenBucket
    wasted_bytes: TokenBucket
    closures: int = 0
    closed_until: float = 0.0
    queue: deque[Delivery] = field(default_factory=deque)
    waiting_bytes: int = 0
    report_bytes: int = 0


class Admission:
    """Admission control: an iterator over deliveries, round-robin over devices, in order for each.

    Args:
        clock: Time source, in monotonic seconds.
        refuse: Called with the device and the error of each dropped message.
        window_bytes: Most bytes of frames that are requested from a device at once.
        takes: Returns true for participants; few messages are accepted from other devices.
        channels: Accepted channels, with the longest message of each.

    Attributes:
        closes: Set when a channel is closed to a device.
    """

    def __init__(
        self,
        clock: Clock,
        refuse: Callable[[str, WireError], None],
        *,
        window_bytes: int,
        takes: Callable[[str], bool] = lambda _device: True,
        channels: Mapping[str, int] = MOST_BYTES,
    ) -> None:
        self._clock, self._refuse, self._takes = clock, refuse, takes
        self.channels = channels
        self._device_bytes = 2 * window_bytes + sum(channels.values())
        self._senders: dict[str, _Sender] = {}
        self._strangers: set[str] = set()
        self._turns: deque[_Sender] = deque()
        self._waiting_bytes = self._reports_bytes = 0
        self._closed: dict[str, dict[str, float]] = {channel: {} for channel in channels}
        self._arrival, self.closes = asyncio.Event(), asyncio.Event()
        self._breath = 0

    @property
    def waiting_bytes(self) -> int:
        """Bytes queued but not read yet."""
        return self._waiting_bytes

    def review_strangers(self) -> None:
        """Recognise strangers that have become participants."""
        self._strangers = {device for device in self._strangers if not self._takes(device)}

    def penalize(self, device: str) -> None:
        """Charge a device extra for a refused message."""
        if sender := self._senders.get(device):
            sender.messages.give(-REFUSED)

    def count_useless(self, device: str, channel: str, size: int) -> None:
        """Count a useless message; close the channel to a device that exceeds the tolerated rate.

        Args:
            size: Payload length in bytes.
        """
        sender, closed = self._senders.get(device) or self._begin(device), self._closed.get(channel)
        now = self._clock()
        if sender is None or closed is None or closed.get(device, now) > now:
            return  # sent before the closure took effect
        if sender.wasted.take(1, now) and sender.wasted_bytes.take(size + PACKET_BYTES, now):
            return
        if now - sender.closed_until > LONGEST_CLOSED_S:
            sender.closures = 0
        seconds = min(LONGEST_CLOSED_S, CLOSED_S * 2.0**sender.closures)
        sender.closures += 1
        closed[device] = sender.closed_until = now + seconds
        sender.wasted = TokenBucket(WASTED_MESSAGES, WASTED_PER_S, AFTERWARDS, now + seconds)
        explanation = f"ignored there for {seconds:.0f} s, doubled each time that it continues"
        level = logging.WARNING if sender.closures == 1 else logging.INFO
        log.log(level, "%s floods %s with useless messages: %s", device, channel, explanation)
        self.closes.set()

    def closed_to(self, channel: str) -> set[str]:
        """Return the devices that a channel is closed to now."""
        now = self._clock()
        self._closed[channel] = {device: until for device, until in self._closed[channel].items() if until > now}
        return set(self._closed[channel])

    def has_room(self, device: str, channel: str, size: int) -> bool:
        """Return true if a device's queue has room for a frame.

        Args:
            size: Payload length in bytes.
        """
        sender = self._senders.get(device)
        return channel in FRAMED and sender is not None and sender.waiting_bytes + size <= self._device_bytes

    def put(self, delivery: Delivery) -> None:
        """Queue a delivery or drop it; called for every message, so it decodes nothing."""
        name, data = delivery
        device, channel = parse_device(name), parse_channel(name)
        sender = self._senders.get(device) or self._begin(device)
        if sender and (channel in FROM_STRANGERS or device not in self._strangers):
            if why := self._find_objection(sender, channel, data):
                self._refuse(device, why)
                self.count_useless(device, channel, len(data))
            else:
                self._queue(sender, delivery)

    def _begin(self, device: str) -> _Sender | None:
        """Create the account of a new device; None if its name is invalid or there are too many."""
        if not is_name(device):
            return None  # the server's own topics
        is_stranger = not self._takes(device)
        if len(self._strangers) >= MOST_STRANGERS if is_stranger else len(self._senders) >= MOST_DEVICES:
            self._refuse(device, WireError(f"too many device names, {device} is ignored", reason="too-many-devices"))
            return None
        if is_stranger:
            self._strangers.add(device)
        now = self._clock()
        wasted_bytes = max(BYTES, self._device_bytes)
        self._senders[device] = sender = _Sender(
            device,
            messages=TokenBucket(MESSAGES, MESSAGES_PER_S, MESSAGES, now),
            bytes=TokenBucket(BYTES, BYTES_PER_S, BYTES, now),
            rare=TokenBucket(RARE, RARE_PER_S, RARE, now),
            wasted=TokenBucket(WASTED_MESSAGES, WASTED_PER_S, WASTED_MESSAGES, now),
            wasted_bytes=TokenBucket(wasted_bytes, BYTES_PER_S, wasted_bytes, now),
        )
        return sender

    def _find_objection(self, sender: _Sender, channel: str, data: bytes) -> WireError | None:
        """Return why a message is dropped; None if it is accepted, after charging it."""
        size = len(data)
        if not (channel in FRAMED and is_frame(data)):
            if size > (most := self.channels.get(channel, 0)):
                return WireError(f"{channel} of {size} bytes exceeds the limit of {most}", reason="oversized")
            now = self._clock()
            if not sender.messages.take(1, now) or not sender.bytes.take(size, now):
                return WireError(f"more than {MESSAGES_PER_S:.0f} messages a second", reason="flood")
            if channel in SELDOM and not sender.rare.take(1, now):
                return WireError(f"more than {RARE_PER_S:.0f} births, deaths and reports a second", reason="flood")
            if channel == "report" and not self._account_report(sender, size):
                return WireError(f"reports of more than {REPORTS_BYTES} bytes in all", reason="oversized")
        over = sender.waiting_bytes + size > self._device_bytes or len(sender.queue) >= WAITING_MESSAGES
        if over or self._waiting_bytes + size > WAITING_BYTES:
            return WireError("queue is full", reason="flood")
        return None

    def _account_report(self, sender: _Sender, size: int) -> bool:
        """Account for a device's last report; return false if there is no room for it."""
        total = self._reports_bytes + size - sender.report_bytes
        if total > REPORTS_BYTES:
            return False
        self._reports_bytes, sender.report_bytes = total, size
        return True

    def _queue(self, sender: _Sender, delivery: Delivery) -> None:
        if not sender.queue:
            self._turns.append(sender)
        sender.queue.append(delivery)
        size = len(delivery[1])
        sender.waiting_bytes += size
        self._waiting_bytes += size
        self._arrival.set()

    def __aiter__(self) -> Admission:
        return self

    async def __anext__(self) -> Delivery:
        """Wait for the next delivery; the iterator never ends."""
        self._breath += 1
        if self._breath % BREATH == 0:
            await asyncio.sleep(0)
        while not self._turns:
            self._arrival.clear()
            await self._arrival.wait()
        sender = self._turns.popleft()
        delivery = sender.queue.popleft()
        size = len(delivery[1])
        sender.waiting_bytes -= size
        self._waiting_bytes -= size
        if sender.queue:
            self._turns.append(sender)
        return delivery
