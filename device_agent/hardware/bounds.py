"""Plausibility bounds of measured values by unit."""

from __future__ import annotations

import math
from collections.abc import Mapping

Bounds = tuple[float, float]

MAX_CPUS = 1024
MEMORY_BYTES: Bounds = (float(1 << 16), float(1 << 50))
"""Memory of a board, or a memory limit; nothing runs in less."""

COUNTER_BYTES: Bounds = (0.0, 2.0**64)
VOLTS: Bounds = (0.0, 100.0)
AMPERES: Bounds = (-200.0, 200.0)
"""Negative into a charging battery."""

LEAST_RAIL_W = -1.0
"""A sensor's offset can make an idle rail slightly negative."""

WATTS: Bounds = (-1e5, 1e5)
"""For an added power chip; one before a battery is negative while it charges."""

BOUNDS: Mapping[str, Bounds] = {
    "_hertz": (0.0, 2e10),
    "_watts": WATTS,
    "_joules": (0.0, 1e15),
    "_celsius": (-100.0, 250.0),
    "_bytes": COUNTER_BYTES,
    "_bits_per_s": (0.0, 1e12),
    "_seconds": (0.0, 1e12),
    "_ratio": (0.0, 1.0),
    "_flag": (0.0, 1.0),
    "_count": (0.0, 1e12),
    "_dbm": (-150.0, 50.0),
}
"""By the suffix of a value's name, which is its unit; a probe with closer bounds applies its own."""


def is_plausible(name: str, value: float) -> bool:
    """Return True if a value is finite and within the bounds of its unit."""
    low, high = next((bounds for ending, bounds in BOUNDS.items() if name.endswith(ending)), (-math.inf, math.inf))
    return math.isfinite(value) and low <= value <= high
