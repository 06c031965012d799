"""Simulated network link: rate, delay and loss, in virtual or real time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Protocol, TypeAlias

from shared.errors import Unreachable
from shared.runtime.clock import Clock
from shared.runtime.executor import background
from shared.transfer.frames import is_frame
from shared.transport.base import Delivery, Inbox, Transport

Publish: TypeAlias = Callable[[], Awaitable[None]]


class Flow(Protocol):
    """A time-varying rate."""

    def finish_time(self, t0: float, amount: float, /) -> float:
        """Return the earliest second by which `amount` bits that begin at `t0` have passed; infinite if never."""
        ...


@dataclass(frozen=True)
class Rate:
    """Properties of a link.

    Attributes:
        up_bits_per_second: From the device, fixed or varying over the clock's seconds; None for no limit.
        down_bits_per_second: To the device; None for no limit.
        delay_s: One-way delay, each way.
        loss: Share of frames that are lost, each way; on the way up also of other messages that are not assured.
    """

    up_bits_per_second: float | Flow | None = None
    down_bits_per_second: float | Flow | None = None
    delay_s: float = 0.0
    loss: float = 0.0


class Direction:
    """One direction of a link: messages pass in order, each arriving a delay after its last byte was sent."""

    def __init__(self, clock: Clock, bits_per_second: float | Flow | None, delay_s: float) -> None:
        """Start with an idle link."""
        self._clock, self.bits_per_second, self._delay_s = clock, bits_per_second, delay_s
        self._free_at = 0.0

    def enter(self, size: int) -> tuple[float, float]:
        """Return when `size` bytes that are sent now will have left, and when they will have arrived."""
        start, rate = max(self._free_at, self._clock()), self.bits_per_second
        if rate is None or isinstance(rate, float | int):
            self._free_at = start + (8 * size / rate if rate else 0.0)
        else:
            self._free_at = rate.finish_time(start, 8 * size)
        return self._free_at, self._free_at + self._delay_s


@dataclass
class Link:
    """A device's link to the broker. Assured messages are accepted on arrival, others when they have left.

    Attributes:
        connected: While it is not set, nothing passes: frames are lost, messages to the device wait.
    """

    inner: Transport
    rate: Rate
    clock: Clock
    seed: int = 0
    connected: asyncio.Event = field(default_factory=asyncio.Event)
    _up: Direction = field(init=False)
    _down: Direction = field(init=False)
    _random: Random = field(init=False)
    _flight: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        """Create both directions, seed the losses, connect."""
        self.connected.set()
        self._up = Direction(self.clock, self.rate.up_bits_per_second, self.rate.delay_s)
        self._down = Direction(self.clock, self.rate.down_bits_per_second, self.rate.delay_s)
        self._random = Random(self.seed)  # noqa: S311 - a model of a radio, not a secret

    def tune(self, rate: Rate) -> None:
        """Change the rate of future messages; those in flight are not affected."""
        self.rate = rate
        self._up.bits_per_second, self._down.bits_per_second = rate.up_bits_per_second, rate.down_bits_per_second

    @property
    def max_payload_bytes(self) -> int:
        return self.inner.max_payload_bytes

    async def publish(self, topic: str, payload: bytes, *, retain: bool = False, assured: bool = True) -> None:
        self._require_connected()
        sent_at, arrives = self._up.enter(len(payload))
        flight = self._flight if self._flight and not self._flight.done() else None
        if assured or self._random.random() >= self.rate.loss:
            publish = partial(self.inner.publish, topic, payload, retain=retain, assured=assured)
            if arrives <= self.clock() and not flight:  # a link without limits needs no task for every message
                await publish()
                return
            flight = self._flight = asyncio.create_task(
                self._land(arrives, publish, flight, assured=assured), name="link-up"
            )
        await self._until(sent_at)
        if assured and flight:
            await flight

    async def _land(self, moment: float, publish: Publish, before: asyncio.Task[None] | None, *, assured: bool) -> None:
        """Publish at the given moment, but not before earlier messages."""
        await self._until(moment)
        if before:
            await asyncio.wait({before})
        try:
            self._require_connected()
            await publish()
        except Unreachable:
            if assured:
                raise  # nobody waits for the outcome of other messages

    @asynccontextmanager
    async def subscribe(self, *patterns: str) -> AsyncIterator[Inbox]:
        slowed, air, has_arrivals = Inbox(), deque[tuple[float, Delivery]](), asyncio.Event()

        def leave(delivery: Delivery) -> None:
            _, arrives = self._down.enter(len(delivery[1]))
            if not air and arrives <= self.clock() and self.connected.is_set():
                self._hand_over(delivery, slowed)  # no task needed here either
            else:
                air.append((arrives, delivery))
                has_arrivals.set()

        async with self.inner.subscribe(*patterns) as deliveries, background(self._arrive(air, has_arrivals, slowed)):
            deliveries.divert(leave)
            yield slowed

    async def _arrive(self, air: deque[tuple[float, Delivery]], has_arrivals: asyncio.Event, slowed: Inbox) -> None:
        while True:
            await has_arrivals.wait()
            has_arrivals.clear()
            while air:
                moment, delivery = air[0]
                await self._until(moment)
                if not is_frame(delivery[1]):
                    await self.connected.wait()
                self._hand_over(delivery, slowed)
                air.popleft()

    def _hand_over(self, delivery: Delivery, slowed: Inbox) -> None:
        """Deliver a message; some frames are lost."""
        if not is_frame(delivery[1]) or (self.connected.is_set() and self._random.random() >= self.rate.loss):
            slowed.put(delivery)

    def _require_connected(self) -> None:
        if not self.connected.is_set():
            raise Unreachable("the link is down")

    async def _until(self, moment: float) -> None:
        if (wait := moment - self.clock()) > 0:
            await asyncio.sleep(wait)
