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
    """Two levels per device, and the amount of all others just above `lower`, just below and above `upper`.

    Between them no other device's ramp starts or ends. A column has one entry per device.
    """

    lower: Array
    upper: Array
    at_lower: Array
    below_upper: Array
    above_upper: Array

    def others_at(self, level: Array) -> Array:
        """Return the amount of all others at a level inside; constant if one end is infinite."""
        with np.errstate(all="ignore"):
            share = (level - self.lower) / (self.upper - self.lower)
            line = self.at_lower + share * (self.below_upper - self.at_lower)
        amounts: Array = np.where(np.isfinite(self.lower) & np.isfinite(self.upper), line, self.below_upper)
        return amounts

    def narrow(self, level: Array, inside: Mask, others: Array, *, under: Mask) -> _Bracket:
        """Replace the lower or upper end by a level at which others have no jump.

        Args:
            inside: Whether the level lies within the bracket; others are unchanged.
            others: Amount of all others at the level.
            under: Whether the level becomes the lower end; else the upper one.
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
    """Return the amount that `fill` would give each device if only its own ramp were that of `changed`."""
    lows = ramps.low.sum() - ramps.low + changed.low
    highs = ramps.high.sum() - ramps.high + changed.high
    short, ample = ~(lows < room), highs <= room
    refilled = _refilled_amounts(ramps, changed, room)
    amount: Array = np.where(short, changed.low, np.where(ample, changed.high, refilled))
    return amount


def _refilled_amounts(ramps: Ramps, changed: Ramps, room: float) -> Array:
    """Return the amounts of devices with a level between all lows and all highs."""
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
    """Return for each device the neighbouring starts or ends around its level."""
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
