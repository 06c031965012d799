"""Amounts: values with quality; unknown parts are never counted as zero."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence

import msgspec

from shared.protocol.measurements import Cost, Quality
from shared.protocol.plausible import is_plausible

QUALITIES: tuple[Quality, ...] = ("measured", "corrected", "modelled")


class Amount(msgspec.Struct, frozen=True, kw_only=True):
    """A value, or a sum of values.

    Attributes:
        value: In SI units; None if no part is known, or there is nothing to sum.
        whole: Whether every part is known; if not, `value` is a lower bound.
        quality: The worst of the parts'; None if no part reports one.
    """

    value: float | None = None
    whole: bool = True
    quality: Quality | None = None


UNKNOWN = Amount(whole=False)
NONE = Amount()
"""Nothing to measure: neither a value nor zero."""


class AmountSum:
    """Sum of amounts that are added one at a time; it holds their values, since the sum is exact."""

    def __init__(self) -> None:
        self._values, self._is_whole = array("d"), True
        self._quality: Quality | None = None

    def add(self, part: Amount) -> None:
        """Add a part."""
        self._is_whole &= part.whole
        if part.value is not None:
            self._values.append(part.value)
            self._quality = worst_quality((self._quality, part.quality))

    def total(self) -> Amount:
        """Return the sum of the known parts."""
        value = math.fsum(self._values) if self._values else None
        return Amount(value=value, whole=self._is_whole, quality=self._quality)


def sum_known(parts: Iterable[Amount]) -> Amount:
    """Return the sum of the known parts."""
    amounts = AmountSum()
    for part in parts:
        amounts.add(part)
    return amounts.total()


def worst_quality(qualities: Iterable[Quality | None]) -> Quality | None:
    """Return the quality farthest from measured, or None if there is none."""
    return max((quality for quality in qualities if quality), key=QUALITIES.index, default=None)


def amount_or_unknown(value: float | None, quality: Quality | None = None) -> Amount:
    """Return one value as an amount; `UNKNOWN` for None and implausible values."""
    return (
        UNKNOWN if value is None or not is_plausible("amount", value) else Amount(value=float(value), quality=quality)
    )


def share_or_none(value: float | None) -> float | None:
    """Return a fraction from 0 to 1; None for others, which old servers recorded."""
    return value if value is not None and 0 <= value <= 1 else None


def cost_amount(cost: Cost | None, name: str) -> Amount:
    """Return a field of a task's cost by its name in `Cost`."""
    if cost is None:
        return UNKNOWN
    provenance = cost.provenance.get(name)
    return amount_or_unknown(getattr(cost, name), provenance.quality if provenance else None)


def remaining_seconds(whole_s: float, parts: Sequence[Amount]) -> Amount:
    """Return the seconds not accounted for by the parts; unknown if a part is unknown."""
    parts_sum = sum_known(parts)
    if parts_sum.value is None or not parts_sum.whole:
        return UNKNOWN
    return Amount(value=max(0.0, whole_s - parts_sum.value), quality=parts_sum.quality)


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile of sorted values, interpolated linearly."""
    position = share * (len(values) - 1)
    low = math.floor(position)
    high = min(low + 1, len(values) - 1)
    return values[low] + (position - low) * (values[high] - values[low])
