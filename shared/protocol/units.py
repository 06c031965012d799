"""Units of everyday size for figures that people read: seconds as days, joules as kJ, bytes as MB."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

MINUTE_S, HOUR_S, DAY_S = 60.0, 3600.0, 86_400.0


class Unit(NamedTuple):
    """A unit and when to use it.

    Attributes:
        name: As people write it.
        size: In the SI unit, or in bytes.
        least: The least figure that it is used for, as `size` is told.
    """

    name: str
    size: float
    least: float


Units: TypeAlias = Sequence[Unit]
"""Of one quantity, the largest first."""


def decimal_units(name: str) -> Units:
    """Return a unit with its decimal prefixes."""
    sizes = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
    return (*(Unit(f"{prefix}{name}", size, size) for size, prefix in sizes), Unit(name, 1.0, 0.0))


SECONDS: Units = (
    *(Unit(name, size, 2 * size) for name, size in (("d", DAY_S), ("h", HOUR_S), ("min", MINUTE_S))),
    *(Unit("s", 1.0, 0.1), Unit("ms", 1e-3, 0.0)),
)
JOULES: Units = (Unit("MJ", 1e6, 1e6), Unit("kJ", 1e3, 1e3), Unit("J", 1.0, 0.1), Unit("mJ", 1e-3, 0.0))
BYTES: Units = decimal_units("B")
BINARY_BYTES: Units = (
    *(Unit(f"{prefix}B", 2.0**power, 2.0**power) for power, prefix in ((30, "Gi"), (20, "Mi"), (10, "Ki"))),
    Unit("B", 1.0, 0.0),
)


def choose_unit(value: float, units: Units, *, between: tuple[str, str] = ("", "")) -> Unit:
    """Return the unit that fits a figure.

    Args:
        value: The figure in the SI unit; below zero it is taken as it is above.
        units: Of its quantity.
        between: Names of the largest and the smallest unit to choose from; empty for all of them.
    """
    names = [unit.name for unit in units]
    first = names.index(between[0]) if between[0] else 0
    last = names.index(between[1]) if between[1] else len(units) - 1
    chosen = units[first : last + 1]
    return next((unit for unit in chosen if abs(value) >= unit.least), chosen[-1])
