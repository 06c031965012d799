"""What a board measures, as lines for people: units of everyday size, and every lack with its cause.

What two readings of the same counters say about the time between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from device_agent.probes.base import ProbeResult
from device_agent.profile.load import UNKNOWN_PROFILE
from device_agent.profile.schema import Profile
from shared.protocol.measurements import Reading
from shared.protocol.units import BINARY_BYTES, Unit, Units, choose_unit, decimal_units
from shared.runtime.text_table import TextColumn, TextTable, fold_text, table_lines

UNITS: Mapping[str, Units] = {
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
"""By the ending of a figure's name, the first one that fits; a count has none."""

MISSING = (
    ("power.total_watts", "no power figure: name a meter under [board.meter], or run `device-agent calibrate`"),
    ("thermal.hottest_celsius", "no temperature: this board cannot say how near it is to slowing down"),
    ("cpu.f_hertz", "no CPU clock: cycles cannot be counted"),
)
"""What a coordinator optimises with, and what it means that it is missing."""

LEAST_WORDS = 16
"""Columns of a terminal that sources and causes are folded to."""

UNDESCRIBED = "no firmware profile is for this board: `device-agent probe --record DIR` makes what one is written from"


def table(profile: Profile, found: ProbeResult, width: int | None = None) -> list[str]:
    """Return the lines: facts, readings, absences, and what the most important of them mean.

    Args:
        profile: Of the board.
        found: What its probes found.
        width: Of the terminal in columns; None for lines of any length.
    """
    facts = {"board": f"{profile.id}  {profile.name}"} | {
        name: value for name, value in found.facts.items() if name != "board"
    }
    lines = columns(facts.items(), width=width)
    if found.readings:
        head = ("READING", "VALUE", "±", "QUALITY", "SOURCE")
        lines += ["", *columns(map(_row, sorted(found.readings.items())), head, width=width)]
    if found.absent:
        lacks = [(name, one.lack.replace("_", " "), one.cause) for name, one in sorted(found.absent.items())]
        lines += ["", *columns(lacks, ("ABSENT", "WHY", "CAUSE"), width=width)]
    waiting = {name for name, one in found.absent.items() if one.lack == "busy"}
    advice = [meaning for name, meaning in MISSING if name not in found.readings.keys() | waiting]
    advice += [UNDESCRIBED] if profile.id == UNKNOWN_PROFILE.id else []
    return [*lines, "", *(line for one in advice for line in fold_text(one, width))] if advice else lines


def human(name: str, value: float) -> str:
    """Return a figure with its unit, told by the name it has: `cpu.f_hertz`, 1.51e9 -> `1.51 GHz`."""
    if name.endswith("_flag"):
        return "yes" if value else "no"
    if name.endswith("_ratio"):
        return f"{100 * value:.1f} %"
    units = next((units for ending, units in UNITS.items() if name.endswith(ending)), [Unit("", 1.0, 0.0)])
    unit = choose_unit(value, units)
    scaled = value / unit.size
    return f"{scaled:.4g} {unit.name}".rstrip() if abs(scaled) < 1e4 else f"{scaled:.0f} {unit.name}".rstrip()  # noqa: PLR2004


def columns(rows: Iterable[Sequence[str]], headings: Sequence[str] = (), *, width: int | None = None) -> list[str]:
    """Return rows as lines of aligned columns, of which the last is folded first.

    Args:
        rows: Cells; none of them can drive the terminal.
        headings: Of the columns; none where empty.
        width: Of the terminal in columns; None for lines of any length.
    """
    cells = list(rows)
    if not cells:
        return []
    *names, last = headings or [""] * len(cells[0])
    return table_lines(TextTable([*map(TextColumn, names), TextColumn(last, least=LEAST_WORDS)], cells), width)


def _row(item: tuple[str, Reading]) -> tuple[str, str, str, str, str]:
    name, reading = item
    spread = "" if reading.uncertainty is None else human(name, reading.uncertainty)
    return name, human(name, reading.value), spread, reading.quality, reading.source


def _printable(cell: str) -> str:
    return "".join(one if one.isprintable() else "?" for one in cell)


RATES: Mapping[str, tuple[str, float, str]] = {
    "_joules": ("_watts", 1.0, "watts"),
    "_received_bytes": ("_received_bits_per_s", 8.0, "bits_per_s"),
    "_sent_bytes": ("_sent_bits_per_s", 8.0, "bits_per_s"),
    "_count": ("_per_s", 1.0, "per_s"),
}
"""By the ending of a counter's name: the ending of its rate, units of the rate in one of the counter, and the unit."""

BUSY, TOTAL, LOAD = "cputime.busy_seconds", "cputime.total_seconds", "cputime.load_ratio"
COUNTS = frozenset({"throttle.overcurrent_count"})


def rates(before: Mapping[str, Reading], now: Mapping[str, Reading]) -> dict[str, Reading]:
    """Return the mean rates between two readings, by the counters' names with another ending.

    `power.package-0_joules` gives `power.package-0_watts`, `net.eth0_sent_bytes` gives `net.eth0_sent_bits_per_s`;
    busy and total CPU seconds give `cputime.load_ratio`. A counter that went back wrapped or began anew: it gives no
    rate, for nobody knows how far it had come.
    """
    found = {}
    for name in before.keys() & now.keys():
        rate = _renamed(name)
        past_s = now[name].at - before[name].at
        change = now[name].value - before[name].value
        if rate is not None and past_s > 0 and change >= 0:
            new, factor, unit = rate
            found[new] = _mean(now[name], factor * change / past_s, unit)
    return dict(sorted((found | _load(before, now)).items()))


def _renamed(name: str) -> tuple[str, float, str] | None:
    for ending, (new, factor, unit) in RATES.items():
        if name.endswith(ending) and (ending != "_count" or name in COUNTS):
            return name.removesuffix(ending) + new, factor, unit
    return None


def _load(before: Mapping[str, Reading], now: Mapping[str, Reading]) -> dict[str, Reading]:
    if not {BUSY, TOTAL} <= before.keys() & now.keys():
        return {}
    busy = now[BUSY].value - before[BUSY].value
    total = now[TOTAL].value - before[TOTAL].value
    if busy < 0 or total <= 0:
        return {}
    return {LOAD: _mean(now[BUSY], min(1.0, busy / total), "ratio")}  # idle time may go back by a tick (proc(5))


def _mean(counter: Reading, value: float, unit: str) -> Reading:
    return Reading(value=value, unit=unit, source=counter.source, quality=counter.quality, at=counter.at)
