"""Sums of figures of which some may be unknown: what is not known never counts as zero."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from shared.protocol.measurements import Cost, Quality

WORSE: tuple[Quality, ...] = ("measured", "corrected", "modelled")


class Amount(msgspec.Struct, frozen=True, kw_only=True):
    """A figure, or a sum of figures.

    Attributes:
        value: In SI units; None where no part of it is known, or there is nothing to sum.
        whole: Whether every part is known; where not, `value` is a lower bound.
        quality: The worst of the parts'; None where no part says one.
    """

    value: float | None = None
    whole: bool = True
    quality: Quality | None = None


UNKNOWN = Amount(whole=False)
NONE = Amount()
"""Nothing was there to measure, which is no figure, and not zero either."""

MOST = 1e18
"""No task takes so many seconds, joules or bytes: whoever says more is not believed, and sums cannot overflow."""


def total(parts: Iterable[Amount]) -> Amount:
    """Return the sum of the parts that are known."""
    parts = list(parts)
    known = [one.value for one in parts if one.value is not None]
    return Amount(
        value=math.fsum(known) if known else None,
        whole=all(one.whole for one in parts),
        quality=worst([one.quality for one in parts if one.value is not None]),
    )


def worst(qualities: Iterable[Quality | None]) -> Quality | None:
    """Return the quality farthest from measured, None where there is none."""
    return max((one for one in qualities if one), key=WORSE.index, default=None)


def known(value: float | None, quality: Quality | None = None) -> Amount:
    """Return one figure, or that nobody knows it."""
    return UNKNOWN if value is None or not abs(value) <= MOST else Amount(value=float(value), quality=quality)


def figure(cost: Cost | None, name: str) -> Amount:
    """Return a figure of a task's cost, by its name in `Cost`."""
    if cost is None:
        return UNKNOWN
    said = cost.provenance.get(name)
    return known(getattr(cost, name), said.quality if said else None)


def rest(whole_s: float, parts: Sequence[Amount]) -> Amount:
    """Return what is left of some seconds after all of its parts; unknown where one of them is."""
    spent = total(parts)
    if spent.value is None or not spent.whole:
        return UNKNOWN
    return Amount(value=max(0.0, whole_s - spent.value), quality=spent.quality)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile of sorted values, between two of them linearly."""
    place = share * (len(values) - 1)
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (place - low) * (values[high] - values[low])
