"""Format a board's readings as tables; compute rates of its counters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from device_agent.probes.base import ProbeResult
from device_agent.probes.power.rails import NAME_PROFILE
from device_agent.profile.load import UNKNOWN_PROFILE
from device_agent.profile.schema import Profile
from shared.protocol.measurements import Reading
from shared.protocol.units import format_figure
from shared.runtime.text_table import TextColumn, TextTable, fold_text, table_lines

MISSING_FIGURES = (
    ("power.total_watts", "no power reading: configure a meter in [board.meter] or run `device-agent calibrate`"),
    ("thermal.hottest_celsius", "no temperature: imminent throttling cannot be detected"),
    ("cpu.f_hertz", "no CPU clock: cycles cannot be counted"),
)
"""Readings that optimisers need, with the consequence of their absence."""

MIN_COLUMN_WIDTH = 16
"""Minimum width of the folded columns (sources and causes)."""

RAIL_SENSORS = ("ina3221 ", "tegrastats ", "pmic ")

UNDESCRIBED_BOARD = (
    "no firmware profile matches this board; record it with `device-agent probe --record DIR` to create one"
)

RATES: Mapping[str, tuple[str, float, str]] = {
    "_joules": ("_watts", 1.0, "watts"),
    "_received_bytes": ("_received_bits_per_s", 8.0, "bits_per_s"),
    "_sent_bytes": ("_sent_bits_per_s", 8.0, "bits_per_s"),
    "_count": ("_per_s", 1.0, "per_s"),
}
"""By the suffix of a counter: suffix of its rate, conversion factor, and unit of the rate."""

BUSY_SECONDS, TOTAL_SECONDS, LOAD_RATIO = "cputime.busy_seconds", "cputime.total_seconds", "cputime.load_ratio"
RATED_COUNTS = frozenset({"throttle.overcurrent_count"})


def format_table(profile: Profile, result: ProbeResult, width: int | None = None) -> list[str]:
    """Format the tables of a board: facts, readings, absences, and advice on important absences.

    Args:
        width: Columns of the terminal; None for unlimited lines.
    """
    facts = {"board": f"{profile.id}  {profile.name}"} | {
        name: value for name, value in result.facts.items() if name != "board"
    }
    lines = format_columns(facts.items(), width=width)
    if result.readings:
        head = ("READING", "VALUE", "±", "QUALITY", "SOURCE")
        lines += ["", *format_columns(map(_make_row, sorted(result.readings.items())), head, width=width)]
    if result.absent:
        lacks = [
            (name, absence.lack.replace("_", " "), absence.cause) for name, absence in sorted(result.absent.items())
        ]
        lines += ["", *format_columns(lacks, ("ABSENT", "WHY", "CAUSE"), width=width)]
    busy = {name for name, absence in result.absent.items() if absence.lack == "busy"}
    advice = [meaning for name, meaning in MISSING_FIGURES if name not in result.readings.keys() | busy]
    advice += [UNDESCRIBED_BOARD] if profile.id == UNKNOWN_PROFILE.id else []
    advice += [f"{profile.id} does not know what the rails of this board feed: {NAME_PROFILE}"] * bool(
        profile.is_fallback()
        and "power.total_watts" not in result.readings
        and any(reading.source.startswith(RAIL_SENSORS) for reading in result.readings.values())
    )
    return [*lines, "", *(line for hint in advice for line in fold_text(hint, width))] if advice else lines


def format_columns(
    rows: Iterable[Sequence[str]], headings: Sequence[str] = (), *, width: int | None = None
) -> list[str]:
    """Format rows as aligned columns, of which the last is folded first.

    Args:
        rows: Cells; control characters are made harmless.
        headings: Column headings; empty for none.
        width: Columns of the terminal; None for unlimited lines.
    """
    cells = list(rows)
    if not cells:
        return []
    *names, last = headings or [""] * len(cells[0])
    return table_lines(TextTable([*map(TextColumn, names), TextColumn(last, least=MIN_COLUMN_WIDTH)], cells), width)


def _make_row(item: tuple[str, Reading]) -> tuple[str, str, str, str, str]:
    name, reading = item
    spread = "" if reading.uncertainty is None else format_figure(name, reading.uncertainty)
    return name, format_figure(name, reading.value), spread, reading.quality, reading.source


def compute_rates(before: Mapping[str, Reading], now: Mapping[str, Reading]) -> dict[str, Reading]:
    """Compute mean rates between two readings, named after the counters with another suffix.

    `power.package-0_joules` gives `power.package-0_watts`, `net.eth0_sent_bytes` gives `net.eth0_sent_bits_per_s`; busy
    and total CPU seconds give `cputime.load_ratio`. A counter that decreased has wrapped or restarted and gives no
    rate.
    """
    rates = {}
    for name in before.keys() & now.keys():
        rate = _find_rate(name)
        past_s = now[name].at - before[name].at
        change = now[name].value - before[name].value
        if rate is not None and past_s > 0 and change >= 0:
            new, factor, unit = rate
            rates[new] = _make_reading(now[name], factor * change / past_s, unit)
    return dict(sorted((rates | _compute_load(before, now)).items()))


def _find_rate(name: str) -> tuple[str, float, str] | None:
    for ending, (new, factor, unit) in RATES.items():
        if name.endswith(ending) and (ending != "_count" or name in RATED_COUNTS):
            return name.removesuffix(ending) + new, factor, unit
    return None


def _compute_load(before: Mapping[str, Reading], now: Mapping[str, Reading]) -> dict[str, Reading]:
    if not {BUSY_SECONDS, TOTAL_SECONDS} <= before.keys() & now.keys():
        return {}
    busy = now[BUSY_SECONDS].value - before[BUSY_SECONDS].value
    total = now[TOTAL_SECONDS].value - before[TOTAL_SECONDS].value
    if busy < 0 or total <= 0:
        return {}
    return {
        LOAD_RATIO: _make_reading(now[BUSY_SECONDS], min(1.0, busy / total), "ratio")
    }  # idle time may go back by a tick (proc(5))


def _make_reading(counter: Reading, value: float, unit: str) -> Reading:
    return Reading(value=value, unit=unit, source=counter.source, quality=counter.quality, at=counter.at)
