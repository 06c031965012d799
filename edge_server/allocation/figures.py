"""Which figure to decide from: what was measured if that can be true, else the last good one, the profile, a default.

What a device says of itself is no more than its word. A figure that cannot be true is none; one that differs from the
last good one by more than a factor `jump` is taken that far and no further, and has to be said again to go on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from edge_server.journal.decision import Figure

BOUNDS: Mapping[str, tuple[float, float]] = {
    "up_bits_per_s": (1.0, 1e12),
    "down_bits_per_s": (1.0, 1e12),
    "task_s": (1e-6, 1e7),
    "step_s": (1e-9, 1e6),
    "f_hertz": (1e5, 1e11),
    "task_joules": (0.0, 1e9),
    "tx_w": (0.0, 1e3),
    "memory_bytes": (1.0, 1e15),
    "compute_error": (0.25, 4.0),
    "upload_error": (0.25, 4.0),
}
"""Between which values a figure can be true."""


@dataclass(frozen=True)
class Word:
    """What is said of one figure.

    Attributes:
        measured: None where nobody measured it.
        is_stale: Whether that was too long ago.
        profile: What the plan says of the device.
        default: What is taken where nothing is known; None for a figure that may be absent.
    """

    measured: float | None = None
    is_stale: bool = False
    profile: float | None = None
    default: float | None = None


def chosen(name: str, word: Word, last: Figure | None, *, jump: float, smoothing: float) -> Figure | None:
    """Return the figure to decide from, None where nothing is known and nothing is taken for it.

    Args:
        name: Of the figure.
        word: What is said of it.
        last: What was decided from before.
        jump: See there.
        smoothing: Weight of the last good figure beside a new one.
    """
    good = last if last and last.source in ("measured", "last_good") else None
    if (now := _true(name, word.measured)) is not None:
        if word.is_stale:
            return Figure(good.value if good else now, "last_good")
        if good and good.value > 0:
            now = (1 - smoothing) * min(max(now, good.value / jump), good.value * jump) + smoothing * good.value
        return Figure(now, "measured")
    if good:
        return Figure(good.value, "last_good")
    if (told := _true(name, word.profile)) is not None:
        return Figure(told, "profile")
    return None if word.default is None else Figure(word.default, "default")


def _true(name: str, value: float | None) -> float | None:
    low, high = BOUNDS[name]
    return value if value is not None and math.isfinite(value) and low <= value <= high else None
