"""A transport behind a link of given rate and delay: what a device's radio does, in virtual or in real time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random

from shared.chunks import is_frame
from shared.clock import Clock
from shared.transport.base import Inbox, Transport


@dataclass(frozen=True)
class Rate:
    """What a link does to bytes.

    Attributes:
        up_bits_per_second: From the device; None for no limit.
        down_bits_per_second: To the device; None for no limit.
        delay_s: One way, each way.
        loss: Share of frames (never of assured messages) that vanish, each way.
    """

    up_bits_per_second: float | None = None
    down_bits_per_second: float | None = None
    delay_s: float = 0.0
    loss: float = 0.0


@dataclass
class Link:
    """One device's way to the broker. Bytes pass one after the other, each direction on its own."""

    inner: Transport
    rate: Rate
    clock: Clock
    seed: int = 0
    _up_free_at: float = 0.0
    _down_free_at: float = 0.0
    _random: Random = field(init=False)

    def __post_init__(self) -> None:
        """Seed the losses."""
        self._random = Random(self.seed)  # noqa: S311 - a model of a radio, not a secret

    async def publish(self, topic: str, payload: bytes, *, retain: bool = False, assured: bool = True) -> None:
        self._up_free_at = self._after(self._up_free_at, len(payload), self.rate.up_bits_per_second)
        await self._until(self._up_free_at + self.rate.delay_s)
        if not assured and self._random.random() < self.rate.loss:
            return
        await self.inner.publish(topic, payload, retain=retain, assured=assured)

    @asynccontextmanager
    async def subscribe(self, *patterns: str) -> AsyncIterator[Inbox]:
        async with self.inner.subscribe(*patterns) as deliveries:
            slowed = Inbox()
            carrier = asyncio.create_task(self._carry(deliveries, slowed), name="link-down")
            try:
                yield slowed
            finally:
                carrier.cancel()
                await asyncio.gather(carrier, return_exceptions=True)

    async def _carry(self, deliveries: Inbox, slowed: Inbox) -> None:
        async for topic, payload in deliveries:
            self._down_free_at = self._after(self._down_free_at, len(payload), self.rate.down_bits_per_second)
            await self._until(self._down_free_at + self.rate.delay_s)
            if not is_frame(payload) or self._random.random() >= self.rate.loss:
                slowed.put((topic, payload))

    def _after(self, free_at: float, size: int, bits_per_second: float | None) -> float:
        return max(free_at, self.clock()) + (8 * size / bits_per_second if bits_per_second else 0.0)

    async def _until(self, moment: float) -> None:
        if (wait := moment - self.clock()) > 0:
            await asyncio.sleep(wait)
