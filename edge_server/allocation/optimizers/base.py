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
"""`numpy` is our own, exact; `cvxpy` states the same problem to a conic solver, hundreds of times slower."""


class Bound(IntEnum):
    """What keeps a device from getting more; `Bound(code).name.lower()` says it."""

    INTERIOR = 0
    """The budget that all share: its multiplier equals what a little more would buy here."""
    FLOOR = 1
    """Nothing beyond its floor: the others use more of the shared budget better."""
    TIME = 2
    """Its own deadline."""
    FULL = 3
    """It has all that it can use."""
    NOTHING = 4
    """Nothing at all: the others use the shared budget better, and it has no floor."""
    OUT = 5
    """It cannot take part: no time is left to it, or it has no rate or no clock."""
    UNKNOWN = 6
    """A figure of it is no number, or negative."""
    ENERGY = 7
    """Its own joules."""
    MEMORY = 8
    """Its memory."""
    SETTLED = 9
    """What it was given once and for all."""
    FAIRNESS = 10
    """The largest share of what all share that a device may have."""


LEAST, MOST = 1e-30, 1e30
"""Beyond these, a figure counts as none at all or as infinite: products of seven of them are doubles still."""


def column(values: ArrayLike, count: int) -> Array:
    """Return a column of doubles within bounds; one value stands for all devices."""
    figures = np.asarray(values, np.float64)
    figures = figures if figures.shape == (count,) else np.ascontiguousarray(np.broadcast_to(figures, (count,)))
    size = np.abs(figures)
    odd = ((size < LEAST) & (size > 0)) | ((size > MOST) & (size < np.inf))
    return np.where(odd, np.where(size < LEAST, 0.0, np.copysign(np.inf, figures)), figures) if odd.any() else figures


def clip_figure(value: float) -> float:
    """Return one figure within the bounds of a column."""
    return float(column(value, 1)[0])


def mask_valid(*columns: Array) -> Mask:
    """Return which devices have figures that can be true: infinity is one (no clock), NaN and below zero are none."""
    valid = columns[0] >= 0
    for figures in columns[1:]:
        valid &= figures >= 0
    return valid
