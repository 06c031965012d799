"""What a board measures, as lines for people: units of everyday size, and every lack with its cause."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from device_agent.probes.base import Found
from device_agent.profile.load import NOBODY
from device_agent.profile.schema import Profile
from shared.measures import Reading
from shared.text_table import TextColumn, TextTable, fold_text, table_lines

PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
BINARY_PREFIXES = ((2.0**30, "Gi"), (2.0**20, "Mi"), (2.0**10, "Ki"))
UNITS: Mapping[str, tuple[str, Sequence[tuple[float, str]]]] = {
    "_hertz": ("Hz", PREFIXES),
    "_watts": ("W", ()),
    "_joules": ("J", PREFIXES),
    "_celsius": ("°C", ()),
    "_bytes": ("B", BINARY_PREFIXES),
    "_bits_per_s": ("bit/s", PREFIXES),
    "_per_s": ("/s", ()),
    "_seconds": ("s", ()),
    "_dbm": ("dBm", ()),
    "_count": ("", ()),
}
"""By the ending of a figure's name: its unit, and the prefixes that bring it to everyday size."""

MISSING = (
    ("power.total_watts", "no power figure: name a meter under [board.meter], or run `device-agent calibrate`"),
    ("thermal.hottest_celsius", "no temperature: this board cannot say how near it is to slowing down"),
    ("cpu.f_hertz", "no CPU clock: cycles cannot be counted"),
)
"""What a coordinator optimises with, and what it means that it is missing."""

LEAST_WORDS = 16
"""Columns of a terminal that sources and causes are folded to."""

UNDESCRIBED = "no firmware profile is for this board: `device-agent probe --record DIR` makes what one is written from"


def table(profile: Profile, found: Found, width: int | None = None) -> list[str]:
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
    advice += [UNDESCRIBED] if profile.id == NOBODY.id else []
    return [*lines, "", *(line for one in advice for line in fold_text(one, width))] if advice else lines


def human(name: str, value: float) -> str:
    """Return a figure with its unit, told by the name it has: `cpu.f_hertz`, 1.51e9 -> `1.51 GHz`."""
    if name.endswith("_flag"):
        return "yes" if value else "no"
    if name.endswith("_ratio"):
        return f"{100 * value:.1f} %"
    unit, prefixes = next((form for ending, form in UNITS.items() if name.endswith(ending)), ("", ()))
    factor, prefix = next(((size, prefix) for size, prefix in prefixes if abs(value) >= size), (1.0, ""))
    figure = f"{value / factor:.4g}" if abs(value / factor) < 1e4 else f"{value / factor:.0f}"  # noqa: PLR2004
    return f"{figure} {prefix}{unit}".rstrip()


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
