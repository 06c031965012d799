"""Figures in words: their unit, their digits, and the marks of what is known of them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from edge_server.fleet.tables import MARKS
from edge_server.report.digest import Amount
from edge_server.report.html import NOTHING
from shared.protocol.messages import Spec
from shared.protocol.units import BYTES, JOULES, SECONDS, Units, choose_unit

AT_LEAST = "\N{GREATER-THAN OR EQUAL TO}"
PLAIN = (1e-3, 1e6)
"""Figures between these are written without a power of ten."""

MINUS = "\N{MINUS SIGN}"
LEGEND = (
    f"No mark: measured, or counted; {MARKS['corrected']} corrected: measured, then put right by a known error; "
    f"{MARKS['modelled']} modelled: computed, not measured; {AT_LEAST} not all of it is known: at least that; "
    f"{NOTHING} not known."
)

MOVED: Mapping[str, str] = {
    "bytes_up": "model bytes up",
    "bytes_down": "model bytes down",
    "features_bytes": "features bytes up",
    "gradient_bytes": "gradient bytes down",
    "statistics_bytes": "bytes of measuring running statistics",
}
"""In a run with a split session."""

UNITS: Mapping[str, Units] = {"seconds": SECONDS, "joules": JOULES, "bytes": BYTES}


def unit_of(most: float, kind: str) -> tuple[str, float]:
    """Return the unit that fits figures up to `most`, and its size in the SI unit; what is counted has none."""
    if kind not in UNITS:
        return "", 1.0
    unit = choose_unit(most, UNITS[kind])
    return unit.name, unit.size


def amount(one: Amount, kind: str) -> str:
    """Return an amount with its unit and marks, such as `≥ 12.3 kJ ≈`."""
    if one.value is None:
        return NOTHING
    unit, size = unit_of(abs(one.value), kind) if one.value else unit_of(1.0, kind)
    mark = MARKS[one.quality] if one.quality else ""
    return " ".join(filter(None, ("" if one.whole else AT_LEAST, digits(one.value / size), unit, mark)))


def digits(value: float) -> str:
    """Return a figure with three digits, or all of the few more that stand before its point."""
    if value == 0:
        return "0"
    if not PLAIN[0] <= abs(value) < PLAIN[1]:
        return f"{value:.3g}".replace("-", MINUS)
    before = math.floor(math.log10(abs(value))) + 1
    return f"{value:.{max(0, 3 - before)}f}".replace("-", MINUS)


def share(value: float | None) -> str:
    """Return an accuracy in percent."""
    return NOTHING if value is None else f"{100 * value:.2f} %"


def format_loss(value: float | None) -> str:
    """Return a loss."""
    if value is None:
        return NOTHING
    return f"{value:.4f}".replace("-", MINUS) if abs(value) < PLAIN[1] else digits(value)


def change(value: float | None, base: float | None) -> str:
    """Return how far a figure is from another, in percent of that; nothing where either is not known."""
    if value is None or base is None or base == 0:
        return ""
    return _signed(100 * (value / base - 1), "%")


def change_of_share(value: float | None, base: float | None) -> str:
    """Return how far an accuracy is from another, in percentage points."""
    return "" if value is None or base is None else _signed(100 * (value - base), "points")


def _signed(value: float, unit: str) -> str:
    text = f"{abs(value):.1f}"
    sign = "\N{PLUS-MINUS SIGN}" if float(text) == 0 else "+" if value > 0 else MINUS
    return f"{sign}{text} {unit}"


def spec_text(one: Spec) -> str:
    """Return a registered thing with its options."""
    options = ", ".join(f"{name} {value}" for name, value in one.options.items())
    return f"{one.name} ({options})" if options else one.name


def bytes_label(name: str, *, split: bool) -> str:
    """Return what bytes of frames are called by their name in `Moved`; beside a session's exchange, which is whose."""
    return MOVED[name] if split else name.replace("_", " ")


def section(one: msgspec.Struct) -> str:
    """Return a section of a plan on a line by its keys, without those that are absent."""
    found = ((name, getattr(one, name)) for name in one.__struct_fields__)
    return ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in found
        if value is not None
    )
