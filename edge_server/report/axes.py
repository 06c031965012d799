"""Linear axes of charts and their round ticks."""

from __future__ import annotations

import math
from dataclasses import dataclass

STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
TOLERANCE = 1e-9
"""Differences below this, absolute or relative, are drawn as none."""


@dataclass(frozen=True)
class Axis:
    """A linear scale between the drawing coordinates of its first and last tick; ticks are round and ascend."""

    ticks: tuple[float, ...]
    start: float
    end: float

    def at(self, value: float) -> float:
        """Return the drawing coordinate of a value."""
        least, most = self.ticks[0], self.ticks[-1]
        return self.start + (value - least) / (most - least) * (self.end - self.start)


def ticks(least: float, most: float, count: int = 5) -> tuple[float, ...]:
    """Return about so many round ticks that enclose a range; an empty range is widened first."""
    if most - least <= TOLERANCE * max(1.0, abs(least), abs(most)):
        pad = abs(most) * 0.1 if abs(most) > TOLERANCE else 1.0
        least, most = (least - pad if least else 0.0), most + pad
    step = _step((most - least) / count)
    first, last = math.floor(least / step + TOLERANCE), math.ceil(most / step - TOLERANCE)
    return tuple(round(number * step, 12) for number in range(first, last + 1))


def whole_ticks(most: int, count: int = 5) -> tuple[float, ...]:
    """Return about so many integer ticks from 0 to at least `most`."""
    most = max(1, most)
    step = max(1, round(_step(most / count)))
    return tuple(float(number * step) for number in range(math.ceil(most / step) + 1))


def _step(least: float) -> float:
    """Return the smallest round step that is at least so large."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in STEPS if step * power >= least * (1 - TOLERANCE))


def format_tick(tick: float) -> str:
    """Return a tick's label with a typographic minus sign."""
    return f"{tick:.10g}".replace("-", "\N{MINUS SIGN}")
