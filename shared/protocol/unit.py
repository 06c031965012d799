"""Unit of measurement, and its decimal prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias


class Unit(NamedTuple):
    """A unit and when to use it.

    Attributes:
        name: Symbol, as people write it.
        size: Size in the SI unit, or in bytes.
        least: Smallest figure that it is used for, in the SI unit or bytes.
    """

    name: str
    size: float
    least: float


Units: TypeAlias = Sequence[Unit]
"""Units of one quantity, the largest first."""


def decimal_units(name: str) -> Units:
    """Return a unit with its decimal prefixes."""
    sizes = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
    return (*(Unit(f"{prefix}{name}", size, size) for size, prefix in sizes), Unit(name, 1.0, 0.0))
