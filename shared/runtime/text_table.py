"""Tables and paragraphs of plain text, laid out for a terminal's width without cutting a figure.

Where a table is wider than the terminal, columns of words are folded first; then the columns are set in several groups
below each other, every group with the key columns again; at last each row stands by itself, a line a figure.
What is written to a file or a pipe has no width: one line a row, whatever its length.
"""

from __future__ import annotations

import os
import re
import shutil
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal, NamedTuple, TextIO, TypeAlias

GAP = "  "
NARROW_GAP = " "
USUAL_COLUMNS, LEAST_COLUMNS = 80, 20
BREAKS = re.compile(r"[^\-/_.,:=]*[\-/_.,:=]+|[^\-/_.,:=]+")
"""Pieces of a word that is longer than its line: they end behind a separator."""

Style: TypeAlias = Literal["bold", "dim"]
CODES: Mapping[Style, str] = {"bold": "\x1b[1m", "dim": "\x1b[2m"}
PLAIN = "\x1b[0m"


class TextColumn(NamedTuple):
    """A column of a table.

    Attributes:
        heading: What stands above it; may have several lines.
        right: Whether its cells stand at its right side, as figures do.
        least: The width down to which its cells may be folded to several lines; None where they must stay whole.
    """

    heading: str = ""
    right: bool = False
    least: int | None = None


@dataclass(frozen=True)
class TextTable:
    """Rows of cells with what stands around them.

    Attributes:
        columns: From left to right.
        rows: As many cells each as there are columns.
        title: A line above; empty for none.
        caption: Lines below; empty for none.
        keys: How many columns at the left say what a row is; they are repeated where the columns are set in groups.
        seam: The column that a new group begins with where not all fit into one; 0 for none.
        styles: By row, how a terminal shows it.
    """

    columns: Sequence[TextColumn]
    rows: Sequence[Sequence[str]]
    title: str = ""
    caption: str = ""
    keys: int = 1
    seam: int = 0
    styles: Mapping[int, Style] = field(default_factory=dict)


def terminal_columns(stream: TextIO) -> int | None:
    """Return the width of the terminal that a stream writes to; None where it is a file or a pipe."""
    if not stream.isatty():
        return None
    return max(LEAST_COLUMNS, shutil.get_terminal_size((USUAL_COLUMNS, 24)).columns)


def write_text(stream: TextIO, *parts: TextTable | str) -> None:
    """Write tables and paragraphs for the stream's width, with bold headings on a terminal that shows them."""
    width = terminal_columns(stream)
    styled = width is not None and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
    for number, part in enumerate(parts):
        lines = fold_text(part, width) if isinstance(part, str) else table_lines(part, width, styled=styled)
        if number and isinstance(part, TextTable) and part.rows:
            stream.write("\n")
        stream.write("".join(f"{line}\n" for line in lines))
    stream.flush()


def fits(table: TextTable, width: int) -> bool:
    """Tell whether every row of a table is one line of a terminal, none of its words folded."""
    columns = range(len(table.columns))
    whole = (_natural(table.columns[one].heading.split("\n"), [row[one] for row in table.rows]) for one in columns)
    return sum(whole) + len(GAP) * (len(columns) - 1) <= width


def table_lines(table: TextTable, width: int | None, *, styled: bool = False) -> list[str]:
    """Return a table as lines that are no longer than a width.

    Args:
        width: Of the terminal in columns; None for any.
        styled: Whether to mark headings and rows with a terminal's control sequences.
    """
    rows = [[printable_text(cell) for cell in row] for row in table.rows]
    wide, narrow = (_groups(table, rows, len(gap), width) for gap in (GAP, NARROW_GAP))
    gap, groups = (NARROW_GAP, narrow) if len(narrow) < len(wide) or not wide else (GAP, wide)
    lines = fold_text(table.title, width) if table.title else []
    for number, widths in enumerate(groups):
        lines += [""] * bool(number)
        lines += _block(table, rows, widths, gap, styled=styled)
    if not groups:
        lines += _records(table, rows, width or USUAL_COLUMNS)
    return lines + (fold_text(table.caption, width) if table.caption else [])


def fold_text(text: str, width: int | None) -> list[str]:
    """Return paragraphs as lines that are no longer than a width; what follows of one is indented as it is."""
    lines = []
    for line in text.split("\n"):
        kept = line.lstrip(" ")
        indent = " " * (len(line) - len(kept))
        shown = printable_text(kept)
        if width is None or display_width(line) <= width:
            lines.append((indent + shown).rstrip())
        else:
            first, *more = fold_words(shown, max(1, width - len(indent) - 2))
            lines += [indent + first, *(f"{indent}  {one}" for one in more)]
    return lines


def fold_words(text: str, width: int) -> list[str]:
    """Return a text as lines of whole words; a word that is longer than a line is broken behind a separator."""
    if display_width(text) <= width:
        return [text]
    lines, here = [], ""
    for word in text.split(" "):
        joined = f"{here} {word}" if here else word
        if display_width(joined) <= width:
            here = joined
            continue
        lines += [here] * bool(here)
        *whole, here = _broken(word, width)
        lines += whole
    return [*lines, here]


def display_width(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(one) else 1 + (unicodedata.east_asian_width(one) in "WF") for one in text)


def printable_text(text: str) -> str:
    """Return a text with `?` for whatever could drive the terminal."""
    return text if text.isprintable() else "".join(one if one.isprintable() else "?" for one in text)


def _broken(word: str, width: int) -> list[str]:
    """Return a word in parts that fit a width."""
    if display_width(word) <= width:
        return [word]
    parts, here = [], ""
    for piece in BREAKS.findall(word):
        if display_width(here + piece) > width:
            parts += [here] * bool(here)
            here = ""
        for one in piece if display_width(piece) > width else (piece,):
            if display_width(here + one) > width:
                parts.append(here)
                here = ""
            here += one
    return [*parts, here]


def _widths(
    table: TextTable, rows: Sequence[Sequence[str]], columns: Sequence[int], gap: int, width: int | None
) -> dict[int, int] | None:
    """Return the width of each column, with words folded where they must be; None where they do not fit."""
    whole = {one: _natural(table.columns[one].heading.split("\n"), [row[one] for row in rows]) for one in columns}
    least = {one: _least(table.columns[one], whole[one]) for one in columns}
    room = None if width is None else width - gap * (len(columns) - 1)
    if room is None or sum(whole.values()) <= room:
        return whole
    if sum(least.values()) > room:
        return None
    while (over := sum(whole.values()) - room) > 0:
        widest = max((one for one in columns if whole[one] > least[one]), key=lambda one: whole[one] - least[one])
        whole[widest] -= max(1, min(over, whole[widest] - least[widest]) // len(columns))
    return whole


def _natural(heading: Sequence[str], cells: Sequence[str]) -> int:
    return max(map(display_width, (*heading, *cells)), default=0)


def _least(column: TextColumn, natural: int) -> int:
    if column.least is None:
        return natural
    return min(natural, max(column.least, _natural(column.heading.split("\n"), ())))


def _groups(table: TextTable, rows: Sequence[Sequence[str]], gap: int, width: int | None) -> list[dict[int, int]]:
    """Return the widths of the columns in groups that fit, each with the key columns; none where one does not fit."""
    if widths := _widths(table, rows, range(len(table.columns)), gap, width):
        return [widths]
    keys = list(range(table.keys))
    groups, here = [], keys
    for one in range(table.keys, len(table.columns)):
        if one != table.seam and _widths(table, rows, [*here, one], gap, width):
            here = [*here, one]
            continue
        groups.append(here)
        here = [*keys, one]
    found = [_widths(table, rows, group, gap, width) for group in (*groups, here)]
    return [one for one in found if one] if all(found) else []


def _block(
    table: TextTable, rows: Sequence[Sequence[str]], widths: Mapping[int, int], gap: str, *, styled: bool
) -> Iterator[str]:
    """Yield headings and rows of a group of columns."""
    headings = [table.columns[one].heading.split("\n") for one in widths]
    if any(map(any, headings)):
        tall = max(map(len, headings))
        level = [[""] * (tall - len(one)) + one for one in headings]
        yield from (_styled(line, "bold" if styled else None) for line in _lines(table, level, widths, gap))
    for number, row in enumerate(rows):
        cells = [fold_words(row[one], width) for one, width in widths.items()]
        style = table.styles.get(number) if styled else None
        yield from (_styled(line, style) for line in _lines(table, cells, widths, gap))


def _lines(table: TextTable, cells: Sequence[Sequence[str]], widths: Mapping[int, int], gap: str) -> Iterator[str]:
    for parts in zip_longest(*cells, fillvalue=""):
        placed = (_placed(part, widths[one], table.columns[one]) for part, one in zip(parts, widths, strict=True))
        yield gap.join(placed).rstrip()


def _placed(text: str, width: int, column: TextColumn) -> str:
    room = " " * (width - display_width(text))
    return room + text if column.right else text + room


def _styled(line: str, style: Style | None) -> str:
    return f"{CODES[style]}{line}{PLAIN}" if style and line else line


def _records(table: TextTable, rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """Yield each row by itself: a line a cell behind its heading, folded where it is longer."""
    names = [column.heading.replace("\n", " ") for column in table.columns]
    indent = max(map(display_width, names), default=0) + len(GAP)
    for number, row in enumerate(rows):
        if number:
            yield ""
        for name, cell in zip(names, row, strict=True):
            first, *more = fold_words(cell, max(LEAST_COLUMNS, width - indent))
            yield (name + " " * (indent - display_width(name)) + first).rstrip()
            yield from (" " * indent + one for one in more)
