"""Send-side flow control: frames wait while too many bytes are in flight."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

MARK_BYTES = 4 << 20
"""About a usual window of frames; more would only take memory, and delay every other message."""


@dataclass
class SendQueue:
    """Messages handed to the client that are not yet written or, with QoS 1, acknowledged.

    Attributes:
        mark_bytes: Above it, frames wait. One frame may always go.
        waiting_bytes: Bytes in the queue.
    """

    mark_bytes: int = MARK_BYTES
    waiting_bytes: int = 0
    _sizes: dict[int, int] = field(default_factory=dict)
    _waiters: list[asyncio.Future[None]] = field(default_factory=list)

    def add(self, number: int, size: int) -> None:
        """Note a message that was handed over."""
        self.waiting_bytes += size - self._sizes.get(number, 0)
        self._sizes[number] = size

    def remove(self, number: int) -> None:
        """Note that a message was written or acknowledged; wake all who wait for room, in order."""
        self.waiting_bytes -= self._sizes.pop(number, 0)
        if self.waiting_bytes < self.mark_bytes:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def room(self, size: int) -> asyncio.Future[None] | None:
        """Return a future that is done when there may be room for `size` bytes; None if there is."""
        if not self.waiting_bytes or self.waiting_bytes + size <= self.mark_bytes:
            return None
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return waiter
