"""Axes: where a figure lies on the paper, and which round figures stand beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass

STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
FLAT = 1e-9
"""Differences below this, or below this share of a figure, are none on paper."""


@dataclass(frozen=True)
class Axis:
    """A linear scale.

    Attributes:
        ticks: Round figures in ascending order; the first and the last are the ends of the axis.
        start: Where on the paper the first tick lies.
        end: Where the last one lies.
    """

    ticks: tuple[float, ...]
    start: float
    end: float

    def at(self, value: float) -> float:
        """Return where on the paper a value lies."""
        least, most = self.ticks[0], self.ticks[-1]
        return self.start + (value - least) / (most - least) * (self.end - self.start)


def ticks(least: float, most: float, about: int = 5) -> tuple[float, ...]:
    """Return about so many round figures that enclose a range; of an empty range, some around it."""
    if most - least <= FLAT * max(1.0, abs(least), abs(most)):
        pad = abs(most) * 0.1 if abs(most) > FLAT else 1.0
        least, most = (least - pad if least else 0.0), most + pad
    step = _step((most - least) / about)
    first, last = math.floor(least / step + FLAT), math.ceil(most / step - FLAT)
    return tuple(round(number * step, 12) for number in range(first, last + 1))


def whole_ticks(most: int, about: int = 5) -> tuple[float, ...]:
    """Return about so many round whole figures from 0 to at least `most`."""
    most = max(1, most)
    step = max(1, round(_step(most / about)))
    return tuple(float(number * step) for number in range(math.ceil(most / step) + 1))


def _step(about: float) -> float:
    """Return the least round figure that is no less."""
    power = 10.0 ** math.floor(math.log10(about))
    return next(step * power for step in STEPS if step * power >= about * (1 - FLAT))


def label(tick: float) -> str:
    """Return a tick's figure."""
    return f"{tick:.10g}".replace("-", "\N{MINUS SIGN}")
