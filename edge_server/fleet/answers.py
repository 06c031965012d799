"""Answers that nobody waits for: refusals and other words to a device that it will cause again if they are lost.

So a device that is answered slowly, or says the same again and again, keeps no other waiting: few answers are under
way at once, and each device gets so many in a while and no more.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from shared.errors import Unreachable
from shared.protocol import wire
from shared.protocol.messages import Ack, Features, Message, Skip, Update, Verdict
from shared.protocol.topics import topic
from shared.runtime.clock import Clock
from shared.transport.base import Transport

log = logging.getLogger(__name__)

OVER = (1 << 31) - 1
"""As the number of a step: the session is over."""

BURST, PER_S = 32.0, 8.0
"""Answers that a device is given at once, and for ever."""
UNDER_WAY = 64


@dataclass
class Answers:
    """What is being said to devices.

    Attributes:
        clock: Monotonic seconds.
    """

    site: str
    transport: Transport
    clock: Clock
    _left: dict[str, tuple[float, float]] = field(default_factory=dict)
    _under_way: set[asyncio.Task[None]] = field(default_factory=set)

    def tell(self, device: str, channel: str, message: Message, cost: float = 1.0) -> None:
        """Say something to a device, without waiting until the broker has it; no more than it is due.

        Args:
            message: What; what is lost, the device causes anew.
            cost: As how many answers it counts.
        """
        if len(self._under_way) < UNDER_WAY and self.is_due(device, cost):
            telling = asyncio.create_task(self._publish(topic(self.site, device, channel), message), name="answer")
            self._under_way.add(telling)
            telling.add_done_callback(self._under_way.discard)

    def is_due(self, device: str, cost: float = 1.0) -> bool:
        """Tell whether a device is due another answer, which is counted then."""
        now = self.clock()
        left, since = self._left.get(device, (BURST, now))
        left = min(BURST, left + PER_S * (now - since))
        may = left >= cost
        self._left[device] = (left - cost * may, now)
        return may

    async def _publish(self, name: str, message: Message) -> None:
        try:
            await self.transport.publish(name, wire.encode(message))
        except Unreachable as error:
            log.debug("not told, the device will say it again: %s", error)

    async def finish(self) -> None:
        """Wait for what is under way."""
        await asyncio.gather(*self._under_way, return_exceptions=True)

    async def close(self) -> None:
        """Give up what is under way."""
        under_way = list(self._under_way)
        for telling in under_way:
            telling.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


def ack(update: Update, verdict: Verdict, reason: str = "") -> Ack:
    """Return the word that settles an update.

    Args:
        verdict: What became of it.
        reason: Why, in words; cut at 500 characters.
    """
    return Ack(
        run=update.run,
        round=update.round,
        device=update.device,
        start=update.start,
        verdict=verdict,
        reason=reason[:500],
    )


def skip(offer: Features, step: int = OVER) -> Skip:
    """Return the word that another step is open than that of an offer; without one, that its session is over."""
    return Skip(run=offer.run, round=offer.round, device=offer.device, start=offer.start, step=step, offered=offer.step)
