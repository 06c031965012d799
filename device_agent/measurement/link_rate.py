"""Estimate a link's rate from past transfers: a mean to report, a low percentile to plan with, and its confidence.

Times add up and rates do not, so that the mean is the harmonic one, weighted by bytes: all bytes over all seconds. No
sockets here; time is an input.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

log = logging.getLogger(__name__)

MAX_HAULS = 8
HALF_LIFE_S = 600.0
MIN_HAUL_BYTES, MIN_HAUL_S = 256 * 1024, 0.5
MIN_PART_BYTES = 64 * 1024
"""Smaller ones tell the delay, not the rate, and are not pooled either."""
STEP_SHARE = 0.4
LOW_SHARE = 0.2
SURE_HAULS, STEADY_SPREAD = 5, 0.25

Confidence: TypeAlias = Literal["high", "medium", "low"]


@dataclass(frozen=True)
class Haul:
    """Bytes of one transfer one way, or of several small ones, and the seconds the link was busy."""

    bytes: int
    seconds: float
    at: float

    @property
    def bits_per_s(self) -> float:
        """Return its rate."""
        return 8 * self.bytes / self.seconds

    @property
    def qualifies(self) -> bool:
        """Return whether it was long enough for a rate."""
        return self.bytes >= MIN_HAUL_BYTES and self.seconds >= MIN_HAUL_S


@dataclass(frozen=True)
class Rate:
    """Estimated rate of one way.

    Attributes:
        bits_per_s: Harmonic mean, weighted by bytes and by age.
        p20_bits_per_s: What it falls short of a fifth of the time; to plan with.
        spread_bits_per_s: One standard deviation of what it is made of; None of a single haul.
        n: Of how many hauls.
        at: When the last one ended.
    """

    bits_per_s: float
    p20_bits_per_s: float
    spread_bits_per_s: float | None
    n: int
    at: float

    def confidence(self, now: float) -> Confidence:
        """Return how far to trust it."""
        spread = math.inf if self.spread_bits_per_s is None else self.spread_bits_per_s / self.bits_per_s
        if now - self.at >= HALF_LIFE_S or self.n == 1:
            return "low"
        return "high" if self.n >= SURE_HAULS and spread < STEADY_SPREAD else "medium"


def estimate(hauls: Sequence[Haul]) -> Rate | None:
    """Estimate the rate from hauls, the newest last; None of none."""
    if not hauls:
        return None
    newest = hauls[-1].at  # as of now all would weigh less, each by the same factor
    weights = [haul.bytes * 0.5 ** ((newest - haul.at) / HALF_LIFE_S) for haul in hauls]
    whole = sum(weights)
    mean = whole / sum(weight / haul.bits_per_s for weight, haul in zip(weights, hauls, strict=True))
    squares = sum(weight * (haul.bits_per_s - mean) ** 2 for weight, haul in zip(weights, hauls, strict=True))
    below, low = 0.0, 0.0
    for rate, weight in sorted((haul.bits_per_s, weight) for weight, haul in zip(weights, hauls, strict=True)):
        below, low = below + weight, rate
        if below >= LOW_SHARE * whole:
            break
    spread = math.sqrt(squares / whole) if len(hauls) > 1 else None
    return Rate(mean, low, spread, len(hauls), newest)


def drop_before_step(hauls: Sequence[Haul]) -> list[Haul]:
    """Return the hauls since the link changed: two in a row far off all before, to the same side, are a change.

    A haul may lie across the change: if those two differ as much between themselves, only the last one counts.
    """
    *before, first, last = hauls
    if not (known := estimate(before)):
        return list(hauls)
    steps = [_compare_rates(haul.bits_per_s, known.bits_per_s) for haul in (first, last)]
    if not steps[0] or steps[0] != steps[1]:
        return list(hauls)
    return [last] if _compare_rates(last.bits_per_s, first.bits_per_s) else [first, last]


def _compare_rates(rate: float, known: float) -> int:
    """Return 1 for a rate far above a known one, -1 for one far below, 0 for neither."""
    return (rate * (1 - STEP_SHARE) > known) - (rate < known * (1 - STEP_SHARE))


@dataclass
class Way:
    """One direction: the hauls that count, and what is pooled to become one."""

    name: str
    hauls: list[Haul] = field(default_factory=list)
    _pool: list[Haul] = field(default_factory=list)

    def add(self, haul: Haul) -> None:
        """Note a transfer; small ones are pooled until they are long enough together."""
        if haul.bytes < MIN_PART_BYTES or not haul.seconds > 0:
            return
        self._pool = [part for part in self._pool if haul.at - part.at < HALF_LIFE_S] + [haul]
        pooled = Haul(sum(part.bytes for part in self._pool), sum(part.seconds for part in self._pool), haul.at)
        if pooled.qualifies:
            self._pool = []
            self.hauls = drop_before_step([*self.hauls, pooled])[-MAX_HAULS:] if self.hauls else [pooled]
            log.debug("link way=%s bytes=%d seconds=%.3f %s", self.name, pooled.bytes, pooled.seconds, self)

    def reset(self) -> None:
        """Forget everything: it was of another link."""
        self.hauls, self._pool = [], []

    def __str__(self) -> str:
        rate = estimate(self.hauls)
        return f"bits_per_s={rate.bits_per_s:.0f} p20={rate.p20_bits_per_s:.0f} n={rate.n}" if rate else "unknown"
