"""Bounded queue of deliveries that takes devices in turns: one waits behind at most one message of each other."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque

from shared.transport.base import Delivery

WAITING_MESSAGES, WAITING_BYTES = 512, 256 << 20
"""Most queued messages of one device, and most queued bytes of all devices."""

BREATH = 64
"""Deliveries after which other tasks of the event loop run."""


class FairQueue:
    """An endless iterator over deliveries, in order for each device.

    Attributes:
        device_bytes: Most queued bytes of one device.
    """

    def __init__(self, device_bytes: int) -> None:
        self.device_bytes, self.waiting_bytes = device_bytes, 0
        self._bytes = defaultdict[str, int](int)
        self._queues: dict[str, deque[Delivery]] = {}
        self._arrival, self._breath = asyncio.Event(), 0

    def has_room(self, device: str, size: int) -> bool:
        """Return true if a delivery of `size` bytes is within the device's bytes."""
        return self._bytes.get(device, 0) + size <= self.device_bytes

    def put(self, device: str, delivery: Delivery) -> bool:
        """Queue a delivery; return false if there is no room for it."""
        size, queue = len(delivery[1]), self._queues.get(device, ())
        is_full = len(queue) >= WAITING_MESSAGES or self.waiting_bytes + size > WAITING_BYTES
        if is_full or not self.has_room(device, size):
            return False
        self._queues.setdefault(device, deque()).append(delivery)
        self._bytes[device] += size
        self.waiting_bytes += size
        self._arrival.set()
        return True

    def __aiter__(self) -> FairQueue:
        return self

    async def __anext__(self) -> Delivery:
        """Wait for the next delivery."""
        self._breath += 1
        if self._breath % BREATH == 0:
            await asyncio.sleep(0)
        while not self._queues:
            self._arrival.clear()
            await self._arrival.wait()
        device = next(iter(self._queues))
        queue = self._queues.pop(device)
        delivery = queue.popleft()
        self._bytes[device] -= len(delivery[1])
        self.waiting_bytes -= len(delivery[1])
        if queue:
            self._queues[device] = queue  # at the end
        return delivery
