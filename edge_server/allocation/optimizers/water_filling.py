"""Water-filling: one shared room among ramps, exact by breakpoints.

Device k takes amount_k(y) = low_k below start_k, high_k above end_k and the straight line between them; start_k = end_k
is a jump. The level y is the largest, up to `most`, with sum_k amount_k(y) <= room. Between two neighbours of the
sorted starts and ends the sum is a straight line, and inside a jump the jumping devices share in proportion, so that
nothing is searched for but the neighbours. Fractional knapsacks (all jumps), quadratic and KKT problems are of
this form. O(N), but for ramps that span many others: O(N log N).

Water-filling for each device anew, with its own ramp moved and all others as they are, for all devices at once.

With F the sum of all ramps, device j's new level is the largest y with F(y) - amount_j(y) + moved_j(y) <= room. F is
known at the ramps' starts and ends, and a straight line between two of them: every device halves its way to its
neighbours among these, all in step, so that a point that many devices look at is summed up once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_server.allocation.optimizers.base import Array, Mask

FEW, NARROW = 512, 1e-13


@dataclass(frozen=True)
class Ramps:
    """What each device would take at each level; columns of one length, low <= high, start <= end, all finite."""

    start: Array
    end: Array
    low: Array
    high: Array

    def above(self, level: float | Array) -> Array:
        """Return the amounts at a level, or at one for each device, with the jumps that are there."""
        return np.where(level >= self.end, self.high, np.where(level <= self.start, self.low, self._between(level)))

    def below(self, level: float | Array) -> Array:
        """Return the amounts at a level, or at one for each device, without the jumps that are there."""
        return np.where(level <= self.start, self.low, np.where(level >= self.end, self.high, self._between(level)))

    def _between(self, level: float | Array) -> Array:
        with np.errstate(all="ignore"):  # jumps and far ends: their lines are not looked at
            share: Array = (level - self.start) / (self.end - self.start)
            return self.low + share * (self.high - self.low)


@dataclass(frozen=True)
class Filled:
    """The water's level and every device's amount; `fits` is false where even all lows together exceed the room."""

    level: float
    amount: Array
    fits: bool = True


def fill(ramps: Ramps, room: float, most: float = math.inf) -> Filled:
    """Return the highest level up to `most` at which all have room; all lows where there is none.

    Args:
        ramps: What each device would take at each level.
    """
    if not ramps.low.sum() < room:
        return Filled(float(ramps.start.min(initial=most)), ramps.low, bool(ramps.low.sum() <= room))
    top = ramps.above(most)
    if top.sum() <= room:
        return Filled(most, top)
    left, right = _neighbours(ramps, room, most)
    before = ramps.below(right)
    if before.sum() <= room:
        return _shared(room, (right, before), (right, ramps.above(right)))
    return _shared(room, (left, ramps.above(left)), (right, before))


def _neighbours(ramps: Ramps, room: float, most: float) -> tuple[float, float]:
    """Return neighbours among all starts and ends: the sum is below the room at the one, not at the other.

    By halves: who is below its start or above its end in what is left is summed up and not looked at again.
    """
    points = np.concatenate((ramps.start, ramps.end))
    points, left, right, moving = points[points < most], -math.inf, most, _Sum.of(ramps)
    while len(points) > FEW:
        middle = float(np.partition(points, len(points) // 2)[len(points) // 2])
        if moving.at(middle) < room:
            left, points, moving = middle, points[points > middle], moving.only(moving.end > middle, above=True)
        else:
            right, points, moving = middle, points[points < middle], moving.only(moving.start < middle, above=False)
    points = np.concatenate(([left], np.sort(points), [right]))
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
    """The sum of ramps at a level, quickly and but for rounding; `settled` are those that no longer move.

    Attributes:
        jumps: Whether any of them is a jump.
    """

    start: Array
    end: Array
    slope: Array
    jump: Array
    jumps: bool
    settled: float

    @classmethod
    def of(cls, ramps: Ramps) -> _Sum:
        """Take a ramp that is as narrow as rounding for a jump at its end."""
        height, width = ramps.high - ramps.low, ramps.end - ramps.start
        wide = width > NARROW * np.abs(ramps.end)
        slope = np.divide(height, width, out=np.zeros_like(height), where=wide)
        height[wide] = 0.0  # what is left are jumps
        return cls(ramps.start, ramps.end, slope, height, bool(height.any()), float(ramps.low.sum()))

    def at(self, level: float) -> float:
        """Return the sum, with the jumps that are there."""
        risen = (np.minimum(np.maximum(self.start, level), self.end) - self.start) @ self.slope
        found = float(self.settled + risen)
        return found + float((self.end <= level) @ self.jump) if self.jumps else found

    def only(self, moves: Mask, *, above: bool) -> _Sum:
        """Return the sum with all others settled above their ends or below their starts."""
        full = ((self.end - self.start) * self.slope + self.jump) @ ~moves if above else 0.0
        kept = np.flatnonzero(moves)
        start, end, slope, jump = (one[kept] for one in (self.start, self.end, self.slope, self.jump))
        return _Sum(start, end, slope, jump, self.jumps, self.settled + float(full))


def _shared(room: float, left: tuple[float, Array], right: tuple[float, Array]) -> Filled:
    """Return the point of the straight line between two levels at which the room is filled."""
    least, most = float(left[1].sum()), float(right[1].sum())
    share = min(1.0, max(0.0, (room - least) / (most - least))) if most > least else 0.0
    level = left[0] + share * (right[0] - left[0])
    return Filled(level, left[1] + share * (right[1] - left[1]))


@dataclass(frozen=True)
class _Bracket:
    """Two levels for each device, and what all others take there: just above the left one, below and above the right.

    Between them, nobody but the device itself starts or ends. A column has one entry a device.
    """

    left: Array
    right: Array
    at_left: Array
    below_right: Array
    above_right: Array

    def between(self, level: Array) -> Array:
        """Return what all others take at a level in between; without an end on a side, as much as at the other."""
        with np.errstate(all="ignore"):
            share = (level - self.left) / (self.right - self.left)
            line = self.at_left + share * (self.below_right - self.at_left)
        found: Array = np.where(np.isfinite(self.left) & np.isfinite(self.right), line, self.below_right)
        return found

    def halved(self, level: Array, inside: Mask, others: Array, *, under: Mask) -> _Bracket:
        """Return the bracket with a level at which others have no jump in place of its left or right end.

        Args:
            level: A level in each bracket.
            inside: Whether the level lies within the bracket.
            others: What all others take at the level.
            under: Whether the level becomes the left end; else the right one.
        """
        up, down = inside & under, inside & ~under
        return _Bracket(
            left=np.where(up, level, self.left),
            right=np.where(down, level, self.right),
            at_left=np.where(up, others, self.at_left),
            below_right=np.where(down, others, self.below_right),
            above_right=np.where(down, others, self.above_right),
        )


def refill(ramps: Ramps, moved: Ramps, room: float) -> Array:
    """Return what each device would take if its ramp alone were the one of `moved`: as `fill` would give it then.

    Args:
        moved: Each device's other ramp.
    """
    lows = ramps.low.sum() - ramps.low + moved.low
    highs = ramps.high.sum() - ramps.high + moved.high
    short, ample = ~(lows < room), highs <= room
    found = _found(ramps, moved, room)
    amount: Array = np.where(short, moved.low, np.where(ample, moved.high, found))
    return amount


def _found(ramps: Ramps, moved: Ramps, room: float) -> Array:
    """Return the amounts of those whose water ends between the sum of all lows and that of all highs."""
    bracket = _bracketed(ramps, moved, room)
    for own in (moved.start, moved.end):
        others = bracket.between(own)
        inside = (bracket.left < own) & (own < bracket.right)
        bracket = bracket.halved(own, inside, others, under=others + moved.above(own) < room)
    before = bracket.below_right + moved.below(bracket.right)
    jumps = before <= room
    low = np.where(jumps, moved.below(bracket.right), moved.above(bracket.left))
    high = np.where(jumps, moved.above(bracket.right), moved.below(bracket.right))
    least = np.where(jumps, before, bracket.at_left + moved.above(bracket.left))
    most = np.where(jumps, bracket.above_right + moved.above(bracket.right), before)
    with np.errstate(all="ignore"):
        share: Array = np.where(most > least, np.clip((room - least) / (most - least), 0.0, 1.0), 0.0)
    amount: Array = low + share * (high - low)
    return amount


def _bracketed(ramps: Ramps, moved: Ramps, room: float) -> _Bracket:
    """Return for each device the neighbours among all starts and ends between which its level is."""
    points = np.unique(np.concatenate((ramps.start, ramps.end)))
    points, last = np.concatenate(([-np.inf], points, [np.inf])), len(points) + 1
    sums = np.full((2, last + 1), np.nan)
    sums[:, 0], sums[:, last] = ramps.low.sum(), ramps.high.sum()

    def others(places: NDArray[np.intp]) -> tuple[Array, Array]:
        for place in np.unique(places[np.isnan(sums[0, places])]):
            sums[:, place] = ramps.below(points[place]).sum(), ramps.above(points[place]).sum()
        level = points[places]
        return sums[0, places] - ramps.below(level), sums[1, places] - ramps.above(level)

    count = len(ramps.start)
    low, high = np.zeros(count, np.intp), np.full(count, last)
    while (high - low > 1).any():
        middle = (low + high) // 2
        under = others(middle)[1] + moved.above(points[middle]) < room
        low, high = np.where(under, middle, low), np.where(under, high, middle)
    (_, at_left), (below_right, above_right) = others(low), others(high)
    return _Bracket(points[low], points[high], at_left, below_right, above_right)
