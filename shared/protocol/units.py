"""Format figures with readable units: seconds as days, joules as kJ, bytes as MB."""

from __future__ import annotations

from collections.abc import Mapping

from shared.protocol.unit import Unit, Units, decimal_units

MINUTE_S, HOUR_S, DAY_S = 60.0, 3600.0, 86_400.0

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
FIGURE_UNITS: Mapping[str, Units] = {
    "_hertz": decimal_units("Hz"),
    "_watts": [Unit("W", 1.0, 0.0)],
    "_joules": decimal_units("J"),
    "_celsius": [Unit("°C", 1.0, 0.0)],
    "_bytes": BINARY_BYTES,
    "_bits_per_s": decimal_units("bit/s"),
    "_per_s": [Unit("/s", 1.0, 0.0)],
    "_seconds": [Unit("s", 1.0, 0.0)],
    "_dbm": [Unit("dBm", 1.0, 0.0)],
}
"""Units of a board's figures by the ending of their names, first match; a count has none."""

LEAST_WHOLE, MOST_WHOLE = 1e4, 1e15
"""Range in which a figure is shown without decimals, with all its digits."""


def choose_unit(value: float, units: Units, *, between: tuple[str, str] = ("", "")) -> Unit:
    """Choose the unit that fits a figure.

    Args:
        value: The figure in the SI unit; its sign is ignored.
        between: Names of the largest and the smallest unit to choose from; empty for all of them.
    """
    names = [unit.name for unit in units]
    first = names.index(between[0]) if between[0] else 0
    last = names.index(between[1]) if between[1] else len(units) - 1
    chosen = units[first : last + 1]
    return next((unit for unit in chosen if abs(value) >= unit.least), chosen[-1])


def format_figure(name: str, value: float, unit: str = "") -> str:
    """Format a figure with the unit that its name ends in: `cpu.f_hertz`, 1.51e9 -> `1.51 GHz`.

    Args:
        value: In the SI unit.
        unit: Fallback where the name ends in no known unit, as from a newer agent; a count has none.
    """
    if name.endswith("_flag"):
        return "yes" if value else "no"
    if name.endswith("_ratio"):
        return f"{100 * value:.1f} %"
    plain = [Unit("" if name.endswith("_count") else unit, 1.0, 0.0)]
    units = next((units for ending, units in FIGURE_UNITS.items() if name.endswith(ending)), plain)
    chosen = choose_unit(value, units)
    scaled = value / chosen.size
    is_whole = LEAST_WHOLE <= abs(scaled) < MOST_WHOLE
    return f"{scaled:.0f} {chosen.name}".rstrip() if is_whole else f"{scaled:.4g} {chosen.name}".rstrip()
