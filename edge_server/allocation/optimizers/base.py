"""Shared types of the optimizers: columns (one entry per device) and `Bound`."""

from __future__ import annotations

from enum import IntEnum
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array: TypeAlias = NDArray[np.float64]
Codes: TypeAlias = NDArray[np.int8]
Mask: TypeAlias = NDArray[np.bool_]

Solver: TypeAlias = Literal["numpy", "cvxpy"]
"""`numpy`: exact algorithms of this package; `cvxpy`: the same problem for a conic solver, hundreds of times slower."""


class Bound(IntEnum):
    """Reason why a device does not get more; recorded as `Bound(code).name.lower()`."""

    INTERIOR = 0
    """The shared budget: its multiplier equals the device's marginal gain."""
    FLOOR = 1
    """Its floor: the shared budget gains more on other devices."""
    TIME = 2
    """Its own deadline."""
    FULL = 3
    """Nothing: it has all that it can use."""
    NOTHING = 4
    """It gets nothing: the shared budget gains more on other devices, and it has no floor."""
    OUT = 5
    """It cannot take part: no time left, no rate or no clock."""
    UNKNOWN = 6
    """One of its figures is NaN or negative."""
    ENERGY = 7
    """Its own joules."""
    MEMORY = 8
    """Its memory."""
    SETTLED = 9
    """A value that is fixed for the whole run."""
    FAIRNESS = 10
    """The maximum share per device."""


LEAST, MOST = 1e-30, 1e30
"""Smaller figures count as zero, larger as infinite; products of seven figures within stay finite doubles."""


def column(values: ArrayLike, count: int) -> Array:
    """Return a column of doubles clipped to `LEAST` and `MOST`; a single value is repeated for all devices."""
    figures = np.asarray(values, np.float64)
    figures = figures if figures.shape == (count,) else np.ascontiguousarray(np.broadcast_to(figures, (count,)))
    size = np.abs(figures)
    odd = ((size < LEAST) & (size > 0)) | ((size > MOST) & (size < np.inf))
    return np.where(odd, np.where(size < LEAST, 0.0, np.copysign(np.inf, figures)), figures) if odd.any() else figures


def clip_figure(value: float) -> float:
    """Clip one figure like `column`."""
    return float(column(value, 1)[0])


def mask_valid(*columns: Array) -> Mask:
    """Mask the devices with valid figures: infinity is valid (no clock), NaN and negative figures are not."""
    valid = columns[0] >= 0
    for figures in columns[1:]:
        valid &= figures >= 0
    return valid
