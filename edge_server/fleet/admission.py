"""Flood protection before decoding: limits on the size and rate of each device's messages.

An honest device repeats what is dropped. A broker queues for one client in one queue, where other devices' messages
wait behind a flood: so a channel is closed to a device that sends too many useless messages (see `subscriptions`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edge_server.fleet.fair_queue import FairQueue
from shared.errors import WireError
from shared.protocol.inference.collaborative import FROM_DEVICE
from shared.protocol.topics import is_name, parse_channel, parse_device
from shared.runtime.clock import Clock
from shared.runtime.token_bucket import TokenBucket
from shared.transfer.frames import HEADER_BYTES, is_frame
from shared.transport.base import Delivery

# The longest message of each subscribed channel; the queue bounds the frames. Births, deaths and reports are rare: each
# notifies all listeners. From devices outside the plan: presence, and updates of earlier runs that must be settled.
MOST_BYTES: Mapping[str, int] = {"status": 4096, "report": 1 << 18, "want": 8192, "update": 1 << 16, "features": 8192}
FRAMED, SELDOM, FROM_STRANGERS = ("update", "features", FROM_DEVICE), ("status", "report"), ("status", "update")
PACKET_BYTES = 1 << 10  # MQTT overhead of a payload: header and topic

# Burst and sustained rate of a device's messages; a split session of small steps sends some 300 a second. A message
# counts once for every 4 KiB, and a refused one `REFUSED` times more.
MESSAGES, MESSAGES_PER_S, COUNTED_BYTES, REFUSED = 2000.0, 1000.0, 4 << 10, 20.0
RARE, RARE_PER_S = 64.0, 4.0
# Useless messages that close a channel; accidents are a window of late frames or a hundred repeated failures. After a
# closure, fewer suffice. Seconds of a closure double each time, and begin again after the longest without a flood.
WASTED_MESSAGES, WASTED_PER_S, WASTED_BYTES, AFTERWARDS = 512.0, 256.0, 8 << 20, 32.0
CLOSED_S, LONGEST_CLOSED_S = 10.0, 600.0
# Last reports of all devices, and their names: some brokers accept any.
REPORTS_BYTES, MOST_DEVICES, MOST_STRANGERS = 32 << 20, 1 << 14, 64

log = logging.getLogger(__name__)


def longest_packet(frame_bytes: int) -> int:
    """Return the length of the longest legitimate packet of a device, in bytes."""
    return max(frame_bytes, *MOST_BYTES.values()) + HEADER_BYTES + PACKET_BYTES


@dataclass
class _Sender:
    """Rates of one device."""

    messages: TokenBucket
    rare: TokenBucket
    wasted: TokenBucket
    closures: int = 0
    closed_until: float = 0.0
    report_bytes: int = 0


class Admission:
    """Admission of deliveries: up to `window_bytes` of frames wait per device; few messages are of no participant."""

    def __init__(
        self,
        clock: Clock,
        refuse: Callable[[str, WireError], None],
        *,
        window_bytes: int,
        takes: Callable[[str], bool] = lambda _device: True,
        channels: Mapping[str, int] = MOST_BYTES,
    ) -> None:
        self._clock, self._refuse, self._takes, self.channels = clock, refuse, takes, channels
        self.queue = FairQueue(2 * window_bytes + sum(channels.values()))
        self._senders: dict[str, _Sender] = {}
        self._strangers: set[str] = set()
        self._reports_bytes = 0
        self._closed: dict[tuple[str, str], float] = {}
        self.closes = asyncio.Event()

    def penalize(self, device: str) -> None:
        """Charge a device extra for a refused message."""
        if sender := self._senders.get(device):
            sender.messages.give(-REFUSED)

    def count_useless(self, device: str, channel: str, size: int) -> None:
        """Count a useless message of `size` bytes; close the channel to a device that exceeds the tolerated rate."""
        sender, now = self._find_sender(device), self._clock()
        if sender is None or channel not in self.channels or self._closed.get((channel, device), now) > now:
            return  # sent before the closure took effect
        burst_bytes = max(WASTED_BYTES, self.queue.device_bytes)
        if sender.wasted.take(max(1.0, WASTED_MESSAGES * (size + PACKET_BYTES) / burst_bytes), now):
            return
        sender.closures = 1 if now - sender.closed_until > LONGEST_CLOSED_S else sender.closures + 1
        seconds = min(LONGEST_CLOSED_S, CLOSED_S * 2.0 ** (sender.closures - 1))
        self._closed[channel, device] = sender.closed_until = now + seconds
        sender.wasted = TokenBucket(WASTED_MESSAGES, WASTED_PER_S, AFTERWARDS, now + seconds)
        level = logging.WARNING if sender.closures == 1 else logging.INFO
        log.log(level, "%s floods %s with useless messages: ignored there for %.0f s", device, channel, seconds)
        self.closes.set()

    def closed_to(self, channel: str) -> set[str]:
        """Return the devices that a channel is closed to now."""
        now = self._clock()
        self._closed = {place: until for place, until in self._closed.items() if until > now}
        return {device for closed, device in self._closed if closed == channel}

    def put(self, delivery: Delivery) -> None:
        """Queue a delivery or drop it; called for every message, so it decodes nothing."""
        device, channel, size = parse_device(delivery[0]), parse_channel(delivery[0]), len(delivery[1])
        sender = self._find_sender(device)
        if device in self._strangers and self._takes(device):
            self._strangers.remove(device)
        if sender is None or (device in self._strangers and channel not in FROM_STRANGERS):
            return
        is_framed = channel in FRAMED and is_frame(delivery[1])
        why = None if is_framed else self._check_message(sender, channel, size)
        if why is None and not self.queue.put(device, delivery):
            why = WireError("queue is full", reason="flood")
        if why:
            self._refuse(device, why)
            self.count_useless(device, channel, size)

    def _find_sender(self, device: str) -> _Sender | None:
        """Return the account of a device; None if its name is invalid or there are too many."""
        if device in self._senders or not is_name(device):  # the latter: the server's own topics
            return self._senders.get(device)
        is_stranger = not self._takes(device)
        if len(self._strangers) >= MOST_STRANGERS if is_stranger else len(self._senders) >= MOST_DEVICES:
            self._refuse(device, WireError(f"too many device names, {device} is ignored", reason="too-many-devices"))
            return None
        if is_stranger:
            self._strangers.add(device)
        rates = ((MESSAGES, MESSAGES_PER_S), (RARE, RARE_PER_S), (WASTED_MESSAGES, WASTED_PER_S))
        messages, rare, wasted = (TokenBucket(burst, per_s, burst, self._clock()) for burst, per_s in rates)
        return self._senders.setdefault(device, _Sender(messages, rare, wasted))

    def _check_message(self, sender: _Sender, channel: str, size: int) -> WireError | None:
        """Return why a message is dropped; None if it is accepted, after charging it."""
        if size > (most := self.channels.get(channel, 0)):
            return WireError(f"{channel} of {size} bytes exceeds the limit of {most}", reason="oversized")
        now = self._clock()
        is_too_fast = not sender.messages.take(max(1.0, size / COUNTED_BYTES), now)
        if is_too_fast or (channel in SELDOM and not sender.rare.take(1, now)):
            return WireError(f"more messages a second than the limit on {channel}", reason="flood")
        growth = size - sender.report_bytes if channel == "report" else 0  # it takes the place of the last one
        if self._reports_bytes + growth > REPORTS_BYTES:
            return WireError(f"reports of more than {REPORTS_BYTES} bytes in all", reason="oversized")
        self._reports_bytes += growth
        sender.report_bytes += growth
        return None
