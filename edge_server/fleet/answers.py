"""Best-effort replies to devices (fire and forget), rate-limited per device.

A lost reply is harmless: the device repeats the message that causes it. A device that is slow, or repeats itself,
delays no other one: few replies are in flight at once, and each device has a rate limit.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from shared.errors import Unreachable
from shared.protocol import wire
from shared.protocol.messages import Ack, Features, Message, Skip, Update, Verdict
from shared.protocol.topics import topic
from shared.runtime.clock import Clock
from shared.runtime.executor import BackgroundTasks
from shared.runtime.token_bucket import TokenBucket
from shared.transport.base import Transport

log = logging.getLogger(__name__)

OVER = (1 << 31) - 1
"""Step number meaning that the session is over."""

BURST, PER_S = 32.0, 8.0
"""Burst and rate of replies to one device."""
UNDER_WAY = 64


@dataclass
class Answers:
    """Rate-limited replies.

    Attributes:
        clock: Time source, monotonic seconds.
    """

    site: str
    transport: Transport
    clock: Clock
    under_way: BackgroundTasks = field(default_factory=BackgroundTasks)
    _buckets: dict[str, TokenBucket] = field(default_factory=dict)

    def tell(self, device: str, channel: str, message: Message, cost: float = 1.0) -> None:
        """Send a reply without waiting for the broker, within the device's rate limit.

        Args:
            cost: Price of the reply, in replies.
        """
        if len(self.under_way) < UNDER_WAY and self.is_due(device, cost):
            self.under_way.start(self._publish(topic(self.site, device, channel), message), "answer")

    def is_due(self, device: str, cost: float = 1.0) -> bool:
        """Return true, and charge the cost, if a device's rate limit permits another reply."""
        now = self.clock()
        return self._buckets.setdefault(device, TokenBucket(BURST, PER_S, BURST, now)).take(cost, now)

    async def _publish(self, name: str, message: Message) -> None:
        try:
            await self.transport.publish(name, wire.encode(message))
        except Unreachable as error:
            log.debug("not sent, the device repeats its message: %s", error)


def build_ack(update: Update, verdict: Verdict, reason: str = "") -> Ack:
    """Return the acknowledgement that settles an update.

    Args:
        reason: Explanation, cut at 500 characters.
    """
    return Ack(
        run=update.run,
        round=update.round,
        device=update.device,
        start=update.start,
        verdict=verdict,
        reason=reason[:500],
    )


def build_skip(offer: Features, step: int = OVER) -> Skip:
    """Return the message that another step is open than the offered one; without a step, that the session is over."""
    return Skip(run=offer.run, round=offer.round, device=offer.device, start=offer.start, step=step, offered=offer.step)
