"""Number formatting of the report: units, digits and marks of quality."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from edge_server.fleet.reading_cell import MARKS
from edge_server.journal.compared_metric import ACCURACY, ComparedMetric
from edge_server.record.amounts import Amount
from edge_server.report.digest import TRAFFIC_LABELS
from shared.protocol.messages import Spec
from shared.protocol.unit import Units
from shared.protocol.units import BYTES, JOULES, SECONDS, choose_unit

NOTHING = "\N{EN DASH}"
AT_LEAST = "\N{GREATER-THAN OR EQUAL TO}"
PLAIN = (1e-3, 1e6)
"""Numbers in this range are written without a power of ten."""

MINUS = "\N{MINUS SIGN}"
LEGEND = (
    f"No mark: measured, or counted; {MARKS['corrected']} corrected: measured, then put right by a known error; "
    f"{MARKS['modelled']} modelled: computed, not measured; {AT_LEAST} not all of it is known: at least that; "
    f"{NOTHING} not known."
)

UNITS: Mapping[str, Units] = {"seconds": SECONDS, "joules": JOULES, "bytes": BYTES}


def unit_of(most: float, kind: str) -> tuple[str, float]:
    """Return the unit that suits values up to `most`, and its size in the SI unit; counts have none."""
    if kind not in UNITS:
        return "", 1.0
    unit = choose_unit(most, UNITS[kind])
    return unit.name, unit.size


def format_amount(amount: Amount, kind: str) -> str:
    """Return an amount with its unit and marks, such as `≥ 12.3 kJ ≈`."""
    if amount.value is None:
        return NOTHING
    unit, size = unit_of(abs(amount.value), kind) if amount.value else unit_of(1.0, kind)
    mark = MARKS[amount.quality] if amount.quality else ""
    return " ".join(filter(None, ("" if amount.whole else AT_LEAST, format_number(amount.value / size), unit, mark)))


def format_bytes(count: float) -> str:
    """Return a number of bytes with its unit."""
    return format_amount(Amount(value=count), "bytes")


def format_number(value: float) -> str:
    """Return a number with three significant digits; integer digits are never cut."""
    if value == 0:
        return "0"
    if not PLAIN[0] <= abs(value) < PLAIN[1]:
        return f"{value:.3g}".replace("-", MINUS)
    before = math.floor(math.log10(abs(value))) + 1
    return f"{value:.{max(0, 3 - before)}f}".replace("-", MINUS)


def format_share(value: float | None) -> str:
    """Return a fraction in percent."""
    return NOTHING if value is None else f"{100 * value:.2f} %"


def format_metric(value: float | None, metric: ComparedMetric) -> str:
    """Return a compared metric: an accuracy in percent, others with four digits."""
    if metric == ACCURACY:
        return format_share(value)
    return NOTHING if value is None else f"{value:.4g}".replace("-", MINUS)


def format_loss(value: float | None) -> str:
    """Return a loss with four decimals."""
    if value is None:
        return NOTHING
    return f"{value:.4f}".replace("-", MINUS) if abs(value) < PLAIN[1] else format_number(value)


def format_change(value: float | None, base: float | None) -> str:
    """Return the relative change from `base` in percent; empty where either is unknown."""
    if value is None or base is None or base == 0:
        return ""
    return _with_sign(100 * (value / base - 1), "%")


def format_share_change(value: float | None, base: float | None) -> str:
    """Return the change of an accuracy in percentage points; empty where either is unknown."""
    return "" if value is None or base is None else _with_sign(100 * (value - base), "points")


def _with_sign(value: float, unit: str) -> str:
    text = f"{abs(value):.1f}"
    sign = "\N{PLUS-MINUS SIGN}" if float(text) == 0 else "+" if value > 0 else MINUS
    return f"{sign}{text} {unit}"


def format_spec(spec: Spec) -> str:
    """Return a plugin's name with its options."""
    options = ", ".join(f"{name} {value}" for name, value in spec.options.items())
    return f"{spec.name} ({options})" if options else spec.name


def bytes_label(name: str, *, split: bool) -> str:
    """Return the label of a `Traffic` field; split runs name whose bytes they are."""
    return TRAFFIC_LABELS[name] if split else name.replace("_", " ")


def format_section(plan_section: msgspec.Struct) -> str:
    """Return a plan section on one line, without its absent keys."""
    fields = ((name, getattr(plan_section, name)) for name in plan_section.__struct_fields__)
    return ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in fields
        if value is not None and value is not msgspec.UNSET
    )
