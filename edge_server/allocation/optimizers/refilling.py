"""Water-filling with one changed ramp, for every device at once.

With F the sum of all ramps, device j's new level is the largest y with F(y) - amount_j(y) + moved_j(y) <= room. F is
known at the ramps' starts and ends, and a straight line between two of them: all devices bisect to their neighbours
among these in step, so that a point that many devices visit is summed up once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_server.allocation.optimizers.base import Array, Mask
from edge_server.allocation.optimizers.water_filling import Ramps


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
