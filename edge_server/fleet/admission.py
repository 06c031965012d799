"""Flood protection: a token bucket and a bounded queue for each device, served in turn, before anything is decoded.

Whatever one device sends, the others' messages wait behind at most one of its own, and what waits of it takes a
bounded part of memory. What is beyond its rate is dropped: an honest device says it again.

A broker forwards faster than it is read, and what it queues for one client is one queue: there the others' messages
wait behind a flood, or are dropped. So a channel is closed to a device that sends too much of no use on it: the server
subscribes to all others by name until that time is over, and drops what is still on its way before it is a message.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field

from shared.errors import WireError
from shared.protocol.inference.collaborative import FROM_DEVICE
from shared.protocol.topics import ANY, is_name, parse_channel, parse_device, topic
from shared.runtime.clock import Clock
from shared.runtime.executor import background
from shared.transfer.frames import HEADER_BYTES, is_frame
from shared.transport.base import Delivery, Transport

log = logging.getLogger(__name__)

MOST_BYTES: Mapping[str, int] = {
    "status": 4 << 10,
    "report": 256 << 10,
    "want": 8 << 10,
    "update": 64 << 10,
    "features": 8 << 10,
}
"""The channels, and the longest message of each. Frames are bounded by what waits of them."""

FRAMED = ("update", "features", FROM_DEVICE)
PACKET_BYTES = 1 << 10
"""What MQTT adds to a payload: its header, the topic."""

MESSAGES, MESSAGES_PER_S = 2000.0, 1000.0
BYTES, BYTES_PER_S = float(8 << 20), float(1 << 20)
"""What a device may say at once, and for ever; a split session of small steps takes some 300 messages a second."""

RARE, RARE_PER_S = 64.0, 4.0
"""Births, deaths and reports of one device, at once and for ever: each is told to everybody, and logged or kept."""

SELDOM = ("status", "report")

REFUSED = 20.0
"""Messages as which one counts that was read in vain: who sends nothing of use is read twenty times more rarely."""

WASTED_MESSAGES, WASTED_PER_S = 512.0, 256.0
"""What of no use a device may send at once, and for ever; beyond that, or beyond the bytes, a channel is closed to it.
An accident explains it: a window of late frames, a hundred failures of a run that is no more, each said again."""

AFTERWARDS = 32.0
"""Of these, what is left to a device when its time is over: a flood that goes on is known by as many messages."""

WAITING_MESSAGES, WAITING_BYTES = 512, 256 << 20
"""Most messages of one device that wait, and most bytes of all devices."""

MOST_DEVICES, MOST_STRANGERS = 1 << 14, 64
"""Names that are told apart: anybody may connect under any number of them where the broker lets him."""

FROM_STRANGERS = ("status", "update")
"""What is heard of devices that the plan does not name: that they are there, and updates of earlier runs to settle."""

CLOSED_S, LONGEST_CLOSED_S = 10.0, 600.0
"""Seconds for which a channel is closed to a device: twice as long each time, until it behaves for the longest."""

LOOK_S = 1.0
"""Between two looks at who else has come, while a channel is closed to somebody."""

REPORTS_BYTES = 32 << 20
"""Of the last reports of all devices, as they came."""

BREATH = 64
"""Deliveries after which whatever else the process has to do gets its turn."""


def longest_packet(frame_bytes: int) -> int:
    """Return the bytes of the longest packet that a device has reason to send, where frames carry so many."""
    return max(frame_bytes, *MOST_BYTES.values()) + HEADER_BYTES + PACKET_BYTES


@dataclass
class _Bucket:
    """Tokens that are spent and come back at a rate."""

    most: float
    per_s: float
    left: float
    since: float

    def take(self, amount: float, now: float) -> bool:
        self.left = min(self.most, self.left + self.per_s * (now - self.since))
        self.since = now
        if self.left < amount:
            return False
        self.left -= amount
        return True


@dataclass
class _Sender:
    """One device: what it may say still, and what of it waits."""

    device: str
    messages: _Bucket
    bytes: _Bucket
    rare: _Bucket
    wasted: _Bucket
    wasted_bytes: _Bucket
    closures: int = 0
    closed_until: float = 0.0
    waiting: deque[Delivery] = field(default_factory=deque)
    waiting_bytes: int = 0
    report_bytes: int = 0


class Admission:
    """What the devices of a site say, in the order of each, theirs in turn.

    Args:
        clock: Monotonic seconds.
        refuse: Is told of what is dropped, and whose it was.
        window_bytes: Most bytes of frames that a device is asked for at once.
        takes: Whether a device may take part; of another one only a little is heard.
        channels: Those that are heard, and the longest message of each.

    Attributes:
        closes: Set when a channel was closed to a device.
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
        self._came, self.closes = asyncio.Event(), asyncio.Event()
        self._breath = 0

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait to be read."""
        return self._waiting_bytes

    def charge(self, device: str) -> None:
        """Count a message that was refused once more, and dearly."""
        if sender := self._senders.get(device):
            sender.messages.left = max(0.0, sender.messages.left - REFUSED)

    def waste(self, device: str, channel: str, size: int) -> None:
        """Count what came and was of no use; close the channel to who sends more of that than an accident explains.

        Args:
            channel: On which it came.
            size: Its bytes.
        """
        sender, closed = self._senders.get(device) or self._begin(device), self._closed.get(channel)
        now = self._clock()
        if sender is None or closed is None or closed.get(device, now) > now:
            return  # what comes after the closure was on its way
        if sender.wasted.take(1, now) and sender.wasted_bytes.take(size + PACKET_BYTES, now):
            return
        if now - sender.closed_until > LONGEST_CLOSED_S:
            sender.closures = 0
        seconds = min(LONGEST_CLOSED_S, CLOSED_S * 2.0**sender.closures)
        sender.closures += 1
        closed[device] = sender.closed_until = now + seconds
        sender.wasted = _Bucket(WASTED_MESSAGES, WASTED_PER_S, AFTERWARDS, now + seconds)
        how = f"not heard there for {seconds:.0f} s, and for twice as long each time that it goes on"
        level = logging.WARNING if sender.closures == 1 else logging.INFO
        log.log(level, "%s floods %s with what nobody asked for: %s", device, channel, how)
        self.closes.set()

    def closed_to(self, channel: str) -> set[str]:
        """Return the devices that a channel is closed to now."""
        now = self._clock()
        self._closed[channel] = {device: until for device, until in self._closed[channel].items() if until > now}
        return set(self._closed[channel])

    def has_room(self, device: str, channel: str, size: int) -> bool:
        """Tell whether a frame of a device may come, as far as what waits of it tells.

        Args:
            channel: On which it comes.
            size: Its bytes.
        """
        sender = self._senders.get(device)
        return channel in FRAMED and sender is not None and sender.waiting_bytes + size <= self._device_bytes

    def put(self, delivery: Delivery) -> None:
        """Take what came, or drop it and say why; called for every message, so it decodes nothing."""
        name, data = delivery
        device, channel = parse_device(name), parse_channel(name)
        sender = self._senders.get(device) or self._begin(device)
        if sender and (channel in FROM_STRANGERS or device not in self._strangers):
            if why := self._objection(sender, channel, data):
                self._refuse(device, why)
                self.waste(device, channel, len(data))
            else:
                self._queue(sender, delivery)

    def _begin(self, device: str) -> _Sender | None:
        """Return the account of a device that is new here; None of one that cannot be."""
        if not is_name(device):
            return None  # the server's own topics
        is_stranger = not self._takes(device)
        if len(self._strangers) >= MOST_STRANGERS if is_stranger else len(self._senders) >= MOST_DEVICES:
            self._refuse(device, WireError(f"{device} is one name too many", reason="too-many-devices"))
            return None
        if is_stranger:
            self._strangers.add(device)
        now = self._clock()
        wasted_bytes = max(BYTES, self._device_bytes)
        self._senders[device] = sender = _Sender(
            device,
            messages=_Bucket(MESSAGES, MESSAGES_PER_S, MESSAGES, now),
            bytes=_Bucket(BYTES, BYTES_PER_S, BYTES, now),
            rare=_Bucket(RARE, RARE_PER_S, RARE, now),
            wasted=_Bucket(WASTED_MESSAGES, WASTED_PER_S, WASTED_MESSAGES, now),
            wasted_bytes=_Bucket(wasted_bytes, BYTES_PER_S, wasted_bytes, now),
        )
        return sender

    def _objection(self, sender: _Sender, channel: str, data: bytes) -> WireError | None:
        """Return why a message is dropped; None where it is taken, which is then counted."""
        size = len(data)
        if not (channel in FRAMED and is_frame(data)):
            if size > (most := self.channels.get(channel, 0)):
                return WireError(f"{channel} of {size} bytes, at most {most} are read", reason="oversized")
            now = self._clock()
            if not sender.messages.take(1, now) or not sender.bytes.take(size, now):
                return WireError(f"more than {MESSAGES_PER_S:.0f} messages a second", reason="flood")
            if channel in SELDOM and not sender.rare.take(1, now):
                return WireError(f"more than {RARE_PER_S:.0f} births, deaths and reports a second", reason="flood")
            if channel == "report" and not self._account_report(sender, size):
                return WireError(f"reports of more than {REPORTS_BYTES} bytes in all", reason="oversized")
        over = sender.waiting_bytes + size > self._device_bytes or len(sender.waiting) >= WAITING_MESSAGES
        if over or self._waiting_bytes + size > WAITING_BYTES:
            return WireError("more than is read at once", reason="flood")
        return None

    def _account_report(self, sender: _Sender, size: int) -> bool:
        """Count a device's last report; tell whether there is room for it."""
        total = self._reports_bytes + size - sender.report_bytes
        if total > REPORTS_BYTES:
            return False
        self._reports_bytes, sender.report_bytes = total, size
        return True

    def _queue(self, sender: _Sender, delivery: Delivery) -> None:
        if not sender.waiting:
            self._turns.append(sender)
        sender.waiting.append(delivery)
        size = len(delivery[1])
        sender.waiting_bytes += size
        self._waiting_bytes += size
        self._came.set()

    def __aiter__(self) -> Admission:
        return self

    async def __anext__(self) -> Delivery:
        """Wait for the next delivery; it never ends."""
        self._breath += 1
        if self._breath % BREATH == 0:
            await asyncio.sleep(0)
        while not self._turns:
            self._came.clear()
            await self._came.wait()
        sender = self._turns.popleft()
        delivery = sender.waiting.popleft()
        size = len(delivery[1])
        sender.waiting_bytes -= size
        self._waiting_bytes -= size
        if sender.waiting:
            self._turns.append(sender)
        return delivery


@dataclass
class Subscriptions:
    """Lets an admission hear all devices; where a channel is closed to one, all others by name.

    Attributes:
        admission: Takes what they say.
        known: Returns the devices that have been heard of.
        closed_topics: Where the topics are noted that are closed now, for the transport.
    """

    transport: Transport
    site: str
    admission: Admission
    known: Callable[[], Iterable[str]]
    closed_topics: set[bytes]
    _opened: dict[str, tuple[list[str], AsyncExitStack]] = field(default_factory=dict)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Hear devices while the block lasts."""
        try:
            await self._renew()
            async with background(self._watch()):
                yield
        finally:
            for _, stack in self._opened.values():
                await stack.aclose()

    async def _watch(self) -> None:
        while True:
            is_closed = any(heard != [ANY] for heard, _ in self._opened.values())
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S if is_closed else None):
                    await self.admission.closes.wait()
            self.admission.closes.clear()
            await self._renew()

    async def _renew(self) -> None:
        """Subscribe anew where others are to be heard than are."""
        closed = {channel: self.admission.closed_to(channel) for channel in self.admission.channels}
        topics = {topic(self.site, device, channel).encode() for channel in closed for device in closed[channel]}
        self.closed_topics.clear()
        self.closed_topics.update(topics)
        for channel, silent in closed.items():
            heard = sorted(set(self.known()) - silent) if silent else [ANY]
            before, left = self._opened.get(channel, ([], AsyncExitStack()))
            if heard != before:
                self._opened[channel] = heard, AsyncExitStack()
                hearing = asyncio.create_task(self._hear(heard, channel, self._opened[channel][1]), name="hear")
                await asyncio.sleep(0)  # the new subscription is on its way before the end of the old one: no gap
                await left.aclose()
                await hearing

    async def _hear(self, devices: list[str], channel: str, stack: AsyncExitStack) -> None:
        if devices:
            names = (topic(self.site, device, channel) for device in devices)
            inbox = await stack.enter_async_context(self.transport.subscribe(*names))
            inbox.divert(self.admission.put)
