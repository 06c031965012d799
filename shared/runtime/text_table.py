"""Plain-text tables and paragraphs, laid out for a terminal's width.

Where a table is wider than the terminal, text columns are folded first; then the columns are split into groups below
each other, every group with the key columns again; as a last resort each row becomes a list of heading and cell.
Numbers are never cut. Output to a file or a pipe has no width limit: one line per row.
"""

from __future__ import annotations

import os
import re
import shutil
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal, NamedTuple, TextIO, TypeAlias

GAP = "  "
NARROW_GAP = " "
USUAL_COLUMNS, LEAST_COLUMNS = 80, 20
BREAKS = re.compile(r"[^\-/_.,:=]*[\-/_.,:=]+|[^\-/_.,:=]+")
"""Pieces of a word that is longer than its line, split after separators."""

Style: TypeAlias = Literal["bold", "dim"]
CODES: Mapping[Style, str] = {"bold": "\x1b[1m", "dim": "\x1b[2m"}
PLAIN = "\x1b[0m"


class TextColumn(NamedTuple):
    """A column of a table.

    Attributes:
        heading: May have several lines.
        right: Whether cells are right-aligned, as numbers are.
        least: Minimum width down to which cells may be folded; None for no folding.
    """

    heading: str = ""
    right: bool = False
    least: int | None = None


@dataclass(frozen=True)
class TextTable:
    """Rows of cells with title, caption and layout hints.

    Attributes:
        rows: As many cells each as there are columns.
        title: Line above the table; empty for none.
        caption: Lines below the table; empty for none.
        keys: Number of key columns at the left, which are repeated in every group of columns.
        seam: Preferred first column of a second group where not all columns fit; 0 for none.
        styles: Terminal style by row number.
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


def write_text(stream: TextIO, parts: TextTable | str | Iterable[TextTable | str]) -> None:
    """Write tables and paragraphs for the stream's width, with bold headings if the terminal supports them."""
    width = terminal_columns(stream)
    styled = width is not None and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
    for number, part in enumerate([parts] if isinstance(parts, (TextTable, str)) else parts):
        lines = fold_text(part, width) if isinstance(part, str) else table_lines(part, width, styled=styled)
        if number and isinstance(part, TextTable) and part.rows:
            stream.write("\n")
        stream.write("".join(f"{line}\n" for line in lines))
    stream.flush()


def fits_width(table: TextTable, width: int) -> bool:
    """Check whether every row of a table fits on one line without folding."""
    columns = range(len(table.columns))
    widths = (
        _natural_width(table.columns[column].heading.split("\n"), [row[column] for row in table.rows])
        for column in columns
    )
    return sum(widths) + len(GAP) * (len(columns) - 1) <= width


def table_lines(table: TextTable, width: int | None, *, styled: bool = False) -> list[str]:
    """Lay out a table as lines of at most `width` columns.

    Args:
        width: None for no limit.
        styled: Whether to emit a terminal's control sequences for headings and styled rows.
    """
    rows = _printable_rows(table)
    gap, groups = column_groups(table, width)
    lines = fold_text(table.title, width) if table.title else []
    for number, widths in enumerate(groups):
        lines += [""] * bool(number)
        lines += _render_group(table, rows, widths, gap, styled=styled)
    if not groups:
        lines += _render_records(table, rows, width or USUAL_COLUMNS)
    return lines + (fold_text(table.caption, width) if table.caption else [])


def column_groups(table: TextTable, width: int | None) -> tuple[str, list[dict[int, int]]]:
    """Return the gap between columns, and the width of each column in groups that stand below each other.

    There are no groups where a column does not fit beside the key columns.
    """
    rows = _printable_rows(table)
    wide, narrow = (_group_columns(table, rows, len(gap), width) for gap in (GAP, NARROW_GAP))
    return (NARROW_GAP, narrow) if len(narrow) < len(wide) or not wide else (GAP, wide)


def _printable_rows(table: TextTable) -> list[list[str]]:
    return [[printable_text(cell) for cell in row] for row in table.rows]


def fold_text(text: str, width: int | None) -> list[str]:
    """Fold paragraphs to a width; continuation lines get a hanging indent."""
    lines = []
    for line in text.split("\n"):
        body = line.lstrip(" ")
        indent = " " * (len(line) - len(body))
        printable = printable_text(body)
        if width is None or display_width(line) <= width:
            lines.append((indent + printable).rstrip())
        else:
            first, *more = fold_words(printable, max(1, width - len(indent) - 2))
            lines += [indent + first, *(f"{indent}  {folded}" for folded in more)]
    return lines


def fold_words(text: str, width: int) -> list[str]:
    """Fold a text between words; a word longer than a line is broken after a separator."""
    if display_width(text) <= width:
        return [text]
    lines, current = [], ""
    for word in text.split(" "):
        joined = f"{current} {word}" if current else word
        if display_width(joined) <= width:
            current = joined
            continue
        lines += [current] * bool(current)
        *full, current = _break_word(word, width)
        lines += full
    return [*lines, current]


def display_width(text: str) -> int:
    """Return the number of terminal columns of a text."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(character) else 1 + (unicodedata.east_asian_width(character) in "WF")
        for character in text
    )


def printable_text(text: str) -> str:
    """Replace characters that could control the terminal by `?`."""
    return text if text.isprintable() else "".join(character if character.isprintable() else "?" for character in text)


def _break_word(word: str, width: int) -> list[str]:
    """Break a word into parts that fit a width."""
    if display_width(word) <= width:
        return [word]
    parts, current = [], ""
    for piece in BREAKS.findall(word):
        if display_width(current + piece) > width:
            parts += [current] * bool(current)
            current = ""
        for fragment in piece if display_width(piece) > width else (piece,):
            if display_width(current + fragment) > width:
                parts.append(current)
                current = ""
            current += fragment
    return [*parts, current]


def _fit_widths(
    table: TextTable, rows: Sequence[Sequence[str]], columns: Sequence[int], gap: int, width: int | None
) -> dict[int, int] | None:
    """Return the width of each column, folding where needed; None where they do not fit."""
    widths = {
        column: _natural_width(table.columns[column].heading.split("\n"), [row[column] for row in rows])
        for column in columns
    }
    least = {column: _minimum_width(table.columns[column], widths[column]) for column in columns}
    room = None if width is None else width - gap * (len(columns) - 1)
    if room is None or sum(widths.values()) <= room:
        return widths
    if sum(least.values()) > room:
        return None
    while (over := sum(widths.values()) - room) > 0:
        widest = max(
            (column for column in columns if widths[column] > least[column]),
            key=lambda column: widths[column] - least[column],
        )
        widths[widest] -= max(1, min(over, widths[widest] - least[widest]) // len(columns))
    return widths


def _natural_width(heading: Sequence[str], cells: Sequence[str]) -> int:
    return max(map(display_width, (*heading, *cells)), default=0)


def _minimum_width(column: TextColumn, natural: int) -> int:
    if column.least is None:
        return natural
    return min(natural, max(column.least, _natural_width(column.heading.split("\n"), ())))


def _group_columns(
    table: TextTable, rows: Sequence[Sequence[str]], gap: int, width: int | None
) -> list[dict[int, int]]:
    """Return column widths in groups that fit, each with the key columns; empty where one does not fit."""
    if widths := _fit_widths(table, rows, range(len(table.columns)), gap, width):
        return [widths]
    keys = list(range(table.keys))
    groups, current = [], keys
    for column in range(table.keys, len(table.columns)):
        if column != table.seam and _fit_widths(table, rows, [*current, column], gap, width):
            current = [*current, column]
            continue
        groups.append(current)
        current = [*keys, column]
    layouts = [_fit_widths(table, rows, group, gap, width) for group in (*groups, current)]
    return [layout for layout in layouts if layout] if all(layouts) else []


def _render_group(
    table: TextTable, rows: Sequence[Sequence[str]], widths: Mapping[int, int], gap: str, *, styled: bool
) -> Iterator[str]:
    """Yield headings and rows of a group of columns."""
    headings = [table.columns[column].heading.split("\n") for column in widths]
    if any(map(any, headings)):
        tall = max(map(len, headings))
        level = [[""] * (tall - len(heading)) + heading for heading in headings]
        yield from (_apply_style(line, "bold" if styled else None) for line in _render_lines(table, level, widths, gap))
    for number, row in enumerate(rows):
        cells = [fold_words(row[column], width) for column, width in widths.items()]
        style = table.styles.get(number) if styled else None
        yield from (_apply_style(line, style) for line in _render_lines(table, cells, widths, gap))


def _render_lines(
    table: TextTable, cells: Sequence[Sequence[str]], widths: Mapping[int, int], gap: str
) -> Iterator[str]:
    for parts in zip_longest(*cells, fillvalue=""):
        aligned = (
            _align(part, widths[column], table.columns[column]) for part, column in zip(parts, widths, strict=True)
        )
        yield gap.join(aligned).rstrip()


def _align(text: str, width: int, column: TextColumn) -> str:
    room = " " * (width - display_width(text))
    return room + text if column.right else text + room


def _apply_style(line: str, style: Style | None) -> str:
    return f"{CODES[style]}{line}{PLAIN}" if style and line else line


def _render_records(table: TextTable, rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """Yield each row as a list: one line per cell behind its heading, folded where it is longer."""
    names = [column.heading.replace("\n", " ") for column in table.columns]
    indent = max(map(display_width, names), default=0) + len(GAP)
    for number, row in enumerate(rows):
        if number:
            yield ""
        for name, cell in zip(names, row, strict=True):
            first, *more = fold_words(cell, max(LEAST_COLUMNS, width - indent))
            yield (name + " " * (indent - display_width(name)) + first).rstrip()
            yield from (" " * indent + line for line in more)
