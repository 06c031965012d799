"""Plausible ranges of figures that devices measure and report; device and server apply this one table."""

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

UNITS: Mapping[str, Bounds] = {
    "_hertz": (0.0, 2e10),
    "_watts": (-1e5, 1e5),  # one before a battery is negative while it charges
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
"""Ranges of readings by the suffix of their names, which is their unit; a probe with closer bounds applies its own."""

FIGURES: Mapping[str, Bounds] = {
    # Costs of tasks; they keep sums from overflowing.
    "cost": (0.0, 1e18),
    "cost_joules": (0.0, 1e9),
    "cost_w": (0.0, 2000.0),
    "amount": (-1e18, 1e18),
    # Metrics of updates with which the server computes.
    "eval_accuracy": (0.0, 1.0),
    "eval_examples": (0.0, 1e12),
    # Figures of the allocation of resources.
    "up_bits_per_s": (1.0, 1e12),
    "down_bits_per_s": (1.0, 1e12),
    "task_s": (1e-6, 1e7),
    "step_s": (1e-9, 1e6),
    "f_hertz": (1e5, 1e11),
    "task_joules": (0.0, 1e9),
    "step_joules": (0.0, 1e9),
    "sigma2": (0.0, 1e12),
    "g2": (0.0, 1e12),
    "tx_w": (0.0, 1e3),
    "upload_w": (0.0, 1e4),
    "download_w": (0.0, 1e4),
    "compute_w": (0.0, 1e4),
    "download_joules": (0.0, 1e9),
    "memory_bytes": (1.0, 1e15),
    "compute_error": (0.25, 4.0),
    "upload_error": (0.25, 4.0),
    "joules_error": (0.25, 4.0),
}
"""Ranges of other figures by name."""


def find_bounds(name: str) -> Bounds:
    """Return the range of a figure, or else of a reading's unit; unbounded if both are unknown."""
    unit = next((bounds for ending, bounds in UNITS.items() if name.endswith(ending)), (-math.inf, math.inf))
    return FIGURES.get(name, unit)


def is_plausible(name: str, value: float | None) -> bool:
    """Return True if a value is finite and within the range of its name."""
    low, high = find_bounds(name)
    return value is not None and math.isfinite(value) and low <= value <= high


def finite_or_none(figure: float | None) -> float | None:
    """Return a number, or None if it is not finite."""
    return figure if figure is not None and math.isfinite(figure) else None
