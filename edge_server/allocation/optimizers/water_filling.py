"""Water-filling: divide a shared budget among ramp functions, exactly by breakpoints.

Device k takes amount_k(y) = low_k below start_k, high_k above end_k and the straight line between them; start_k = end_k
is a jump. The level y is the largest, up to `most`, with sum_k amount_k(y) <= room. Between two neighbours of the
sorted starts and ends the sum is a straight line, and inside a jump the jumping devices share in proportion, so that
only these neighbours have to be searched for. Fractional knapsacks (all jumps), quadratic and KKT problems are of
this form. O(N), or O(N log N) with ramps that span many others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from edge_server.allocation.optimizers.base import Array, Mask

FEW, NARROW = 512, 1e-13


@dataclass(frozen=True)
class Ramps:
    """Amount of each device as a function of the level; columns with low <= high, start <= end, all finite."""

    start: Array
    end: Array
    low: Array
    high: Array

    def above(self, level: float | Array) -> Array:
        """Return the amounts at a level (one for all, or one per device), after jumps at that level."""
        return np.where(level >= self.end, self.high, np.where(level <= self.start, self.low, self._line(level)))

    def below(self, level: float | Array) -> Array:
        """Return the amounts at a level (one for all, or one per device), before jumps at that level."""
        return np.where(level <= self.start, self.low, np.where(level >= self.end, self.high, self._line(level)))

    def _line(self, level: float | Array) -> Array:
        with np.errstate(all="ignore"):  # jumps and far ends: callers discard these lines
            share: Array = (level - self.start) / (self.end - self.start)
            return self.low + share * (self.high - self.low)


@dataclass(frozen=True)
class Filled:
    """Level and amount of every device; `fits` is false if the lows together exceed the room."""

    level: float
    amount: Array
    fits: bool = True


def fill(ramps: Ramps, room: float, most: float = math.inf) -> Filled:
    """Fill the room to the highest level up to `most`; all lows if even they exceed the room."""
    if not ramps.low.sum() < room:
        return Filled(float(ramps.start.min(initial=most)), ramps.low, bool(ramps.low.sum() <= room))
    top = ramps.above(most)
    if top.sum() <= room:
        return Filled(most, top)
    lower, upper = _neighbours(ramps, room, most)
    before = ramps.below(upper)
    if before.sum() <= room:
        return _interpolate(room, (upper, before), (upper, ramps.above(upper)))
    return _interpolate(room, (lower, ramps.above(lower)), (upper, before))


def _neighbours(ramps: Ramps, room: float, most: float) -> tuple[float, float]:
    """Return neighbouring starts or ends: the sum is below the room at the first, not at the second.

    Bisects by medians; ramps that are constant in the remaining interval are summed up once and dropped.
    """
    points = np.concatenate((ramps.start, ramps.end))
    points, lower, upper, moving = points[points < most], -math.inf, most, _Sum.of(ramps)
    while len(points) > FEW:
        middle = float(np.partition(points, len(points) // 2)[len(points) // 2])
        if moving.at(middle) < room:
            lower, points, moving = middle, points[points > middle], moving.only(moving.end > middle, above=True)
        else:
            upper, points, moving = middle, points[points < middle], moving.only(moving.start < middle, above=False)
    points = np.concatenate(([lower], np.sort(points), [upper]))
    under, over = 0, len(points) - 1
    while over - under > 1:
        middle = (under + over) // 2
        if moving.at(float(points[middle])) < room:
            under = middle
        else:
            over = middle
    return float(points[under]), float(points[over])


@dataclass(frozen=True)
class _Sum:
    """Fast sum of ramps at a level, exact except for rounding.

    Attributes:
        jumps: Whether any ramp is a jump.
        fixed: Sum of the ramps that are constant in the remaining interval.
    """

    start: Array
    end: Array
    slope: Array
    jump: Array
    jumps: bool
    fixed: float

    @classmethod
    def of(cls, ramps: Ramps) -> _Sum:
        """Build the sum; ramps as narrow as rounding error become jumps at their ends."""
        height, width = ramps.high - ramps.low, ramps.end - ramps.start
        wide = width > NARROW * np.abs(ramps.end)
        slope = np.divide(height, width, out=np.zeros_like(height), where=wide)
        height[wide] = 0.0  # the remaining heights are jumps
        return cls(ramps.start, ramps.end, slope, height, bool(height.any()), float(ramps.low.sum()))

    def at(self, level: float) -> float:
        """Return the sum after jumps at that level."""
        risen = (np.minimum(np.maximum(self.start, level), self.end) - self.start) @ self.slope
        total = float(self.fixed + risen)
        return total + float((self.end <= level) @ self.jump) if self.jumps else total

    def only(self, moves: Mask, *, above: bool) -> _Sum:
        """Drop the ramps that do not move: above their ends, or below their starts."""
        full = ((self.end - self.start) * self.slope + self.jump) @ ~moves if above else 0.0
        indices = np.flatnonzero(moves)
        start, end, slope, jump = (values[indices] for values in (self.start, self.end, self.slope, self.jump))
        return _Sum(start, end, slope, jump, self.jumps, self.fixed + float(full))


def _interpolate(room: float, lower: tuple[float, Array], upper: tuple[float, Array]) -> Filled:
    """Interpolate between two (level, amounts) so that the room is filled."""
    least, most = float(lower[1].sum()), float(upper[1].sum())
    share = min(1.0, max(0.0, (room - least) / (most - least))) if most > least else 0.0
    level = lower[0] + share * (upper[0] - lower[0])
    return Filled(level, lower[1] + share * (upper[1] - lower[1]))
