"""Estimate a link's rate from past transfers: mean, low percentile, confidence.

The mean is harmonic and weighted by bytes (total bytes over total seconds), since times add up and rates do not. Pure
functions; time is an input.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

log = logging.getLogger(__name__)

MAX_TRANSFERS = 8
HALF_LIFE_S = 600.0
MIN_TRANSFER_BYTES, MIN_TRANSFER_S = 256 * 1024, 0.5
MIN_PART_BYTES = 64 * 1024
"""Smaller transfers show latency rather than rate; they are not pooled either."""
STEP_SHARE = 0.4
LOW_SHARE = 0.2
SURE_TRANSFERS, STEADY_SPREAD = 5, 0.25

Confidence: TypeAlias = Literal["high", "medium", "low"]


@dataclass(frozen=True)
class LinkTransfer:
    """One transfer in one direction, or several small ones pooled: bytes and seconds in which the link was busy."""

    bytes: int
    seconds: float
    at: float

    @property
    def bits_per_s(self) -> float:
        """Mean rate of the transfer."""
        return 8 * self.bytes / self.seconds

    @property
    def qualifies(self) -> bool:
        """True if it was long enough for a rate."""
        return self.bytes >= MIN_TRANSFER_BYTES and self.seconds >= MIN_TRANSFER_S


@dataclass(frozen=True)
class Rate:
    """Estimated rate of one direction.

    Attributes:
        bits_per_s: Harmonic mean, weighted by bytes and age.
        p20_bits_per_s: 20th percentile, for planning.
        spread_bits_per_s: One standard deviation of the transfers; None for a single one.
        at: End of the latest transfer, in seconds of the meter's clock.
    """

    bits_per_s: float
    p20_bits_per_s: float
    spread_bits_per_s: float | None
    n: int
    at: float

    def confidence(self, now: float) -> Confidence:
        """Return the confidence in the rate at a later time."""
        spread = math.inf if self.spread_bits_per_s is None else self.spread_bits_per_s / self.bits_per_s
        if now - self.at >= HALF_LIFE_S or self.n == 1:
            return "low"
        return "high" if self.n >= SURE_TRANSFERS and spread < STEADY_SPREAD else "medium"


def estimate_rate(transfers: Sequence[LinkTransfer]) -> Rate | None:
    """Estimate the rate from transfers in order of time; None without any."""
    if not transfers:
        return None
    newest = transfers[-1].at  # ages relative to now would scale all weights equally
    weights = [transfer.bytes * 0.5 ** ((newest - transfer.at) / HALF_LIFE_S) for transfer in transfers]
    rates = [(transfer.bits_per_s, weight) for weight, transfer in zip(weights, transfers, strict=True)]
    total = sum(weights)
    mean = total / sum(weight / rate for rate, weight in rates)
    squares = sum(weight * (rate - mean) ** 2 for rate, weight in rates)
    below, low = 0.0, 0.0
    for rate, weight in sorted(rates):
        below, low = below + weight, rate
        if below >= LOW_SHARE * total:
            break
    spread = math.sqrt(squares / total) if len(transfers) > 1 else None
    return Rate(mean, low, spread, len(transfers), newest)


def drop_outdated(transfers: Sequence[LinkTransfer]) -> list[LinkTransfer]:
    """Drop transfers from before a change of the link.

    A change is two transfers in a row that deviate far from all earlier ones, in the same direction. The first may
    span the change: if they differ as much from each other, only the last one counts.
    """
    *before, first, last = transfers
    if not (previous := estimate_rate(before)):
        return list(transfers)
    steps = [_compare_rates(transfer.bits_per_s, previous.bits_per_s) for transfer in (first, last)]
    if not steps[0] or steps[0] != steps[1]:
        return list(transfers)
    return [last] if _compare_rates(last.bits_per_s, first.bits_per_s) else [first, last]


def _compare_rates(rate: float, reference: float) -> int:
    """Return 1 for a rate far above the reference, -1 for one far below, else 0."""
    return (rate * (1 - STEP_SHARE) > reference) - (rate < reference * (1 - STEP_SHARE))


@dataclass
class Direction:
    """One direction of a link: transfers that count, and small ones being pooled."""

    name: str
    transfers: list[LinkTransfer] = field(default_factory=list)
    _pool: list[LinkTransfer] = field(default_factory=list)

    def add(self, transfer: LinkTransfer) -> None:
        """Add a transfer; small ones are pooled until they qualify together."""
        if transfer.bytes < MIN_PART_BYTES or not transfer.seconds > 0:
            return
        self._pool = [part for part in self._pool if transfer.at - part.at < HALF_LIFE_S] + [transfer]
        pooled = LinkTransfer(
            sum(part.bytes for part in self._pool), sum(part.seconds for part in self._pool), transfer.at
        )
        if pooled.qualifies:
            self._pool = []
            self.transfers = drop_outdated([*self.transfers, pooled])[-MAX_TRANSFERS:] if self.transfers else [pooled]
            log.debug("link way=%s bytes=%d seconds=%.3f %s", self.name, pooled.bytes, pooled.seconds, self)

    def reset(self) -> None:
        """Forget all transfers, since the link is another one."""
        self.transfers, self._pool = [], []

    def __str__(self) -> str:
        rate = estimate_rate(self.transfers)
        return f"bits_per_s={rate.bits_per_s:.0f} p20={rate.p20_bits_per_s:.0f} n={rate.n}" if rate else "unknown"
