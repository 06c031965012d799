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

    lower: Array
    upper: Array
    at_lower: Array
    below_upper: Array
    above_upper: Array

    def others_at(self, level: Array) -> Array:
        """Return what all others take at a level in between; without an end on a side, as much as at the other."""
        with np.errstate(all="ignore"):
            share = (level - self.lower) / (self.upper - self.lower)
            line = self.at_lower + share * (self.below_upper - self.at_lower)
        amounts: Array = np.where(np.isfinite(self.lower) & np.isfinite(self.upper), line, self.below_upper)
        return amounts

    def narrow(self, level: Array, inside: Mask, others: Array, *, under: Mask) -> _Bracket:
        """Return the bracket with a level at which others have no jump in place of its left or right end.

        Args:
            level: A level in each bracket.
            inside: Whether the level lies within the bracket.
            others: What all others take at the level.
            under: Whether the level becomes the left end; else the right one.
        """
        up, down = inside & under, inside & ~under
        return _Bracket(
            lower=np.where(up, level, self.lower),
            upper=np.where(down, level, self.upper),
            at_lower=np.where(up, others, self.at_lower),
            below_upper=np.where(down, others, self.below_upper),
            above_upper=np.where(down, others, self.above_upper),
        )


def refill(ramps: Ramps, changed: Ramps, room: float) -> Array:
    """Return what each device would take if its ramp alone were the one of `changed`: as `fill` would give it then.

    Args:
        changed: Each device's other ramp.
    """
    lows = ramps.low.sum() - ramps.low + changed.low
    highs = ramps.high.sum() - ramps.high + changed.high
    short, ample = ~(lows < room), highs <= room
    refilled = _refilled_amounts(ramps, changed, room)
    amount: Array = np.where(short, changed.low, np.where(ample, changed.high, refilled))
    return amount


def _refilled_amounts(ramps: Ramps, changed: Ramps, room: float) -> Array:
    """Return the amounts of those whose water ends between the sum of all lows and that of all highs."""
    bracket = _find_brackets(ramps, changed, room)
    for edge in (changed.start, changed.end):
        others = bracket.others_at(edge)
        inside = (bracket.lower < edge) & (edge < bracket.upper)
        bracket = bracket.narrow(edge, inside, others, under=others + changed.above(edge) < room)
    before = bracket.below_upper + changed.below(bracket.upper)
    jumps = before <= room
    low = np.where(jumps, changed.below(bracket.upper), changed.above(bracket.lower))
    high = np.where(jumps, changed.above(bracket.upper), changed.below(bracket.upper))
    least = np.where(jumps, before, bracket.at_lower + changed.above(bracket.lower))
    most = np.where(jumps, bracket.above_upper + changed.above(bracket.upper), before)
    with np.errstate(all="ignore"):
        share: Array = np.where(most > least, np.clip((room - least) / (most - least), 0.0, 1.0), 0.0)
    amount: Array = low + share * (high - low)
    return amount


def _find_brackets(ramps: Ramps, changed: Ramps, room: float) -> _Bracket:
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
        under = others(middle)[1] + changed.above(points[middle]) < room
        low, high = np.where(under, middle, low), np.where(under, high, middle)
    (_, at_lower), (below_upper, above_upper) = others(low), others(high)
    return _Bracket(points[low], points[high], at_lower, below_upper, above_upper)
