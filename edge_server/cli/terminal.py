"""Tables and paragraphs: drawn by rich on a terminal, plain lines in a file or a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TextIO

from shared.runtime import text_table
from shared.runtime.text_table import TextTable, fold_text, fold_words, printable_text

if TYPE_CHECKING:
    from rich.console import RenderableType


def write_text(stream: TextIO, parts: TextTable | str | Iterable[TextTable | str]) -> None:
    """Write tables and paragraphs for the stream's width."""
    width = text_table.terminal_columns(stream)
    if width is None:
        text_table.write_text(stream, parts)
        return
    from rich.console import Console  # noqa: PLC0415 - not needed in a pipe

    console = Console(file=stream, width=width, force_terminal=True, highlight=False)
    for number, part in enumerate([parts] if isinstance(parts, (TextTable, str)) else parts):
        if number and isinstance(part, TextTable) and part.rows:
            console.print()
        for drawn in _draw(part, width):
            console.print(drawn, crop=False, no_wrap=True, overflow="ignore")


def _draw(part: TextTable | str, width: int) -> Iterator[RenderableType]:
    """Yield what rich prints; columns that do not fit are below the others, and cells are folded after separators."""
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    gap, groups = ("", []) if isinstance(part, str) else text_table.column_groups(part, width)
    if isinstance(part, str) or not groups:
        lines = fold_text(part, width) if isinstance(part, str) else text_table.table_lines(part, width)
        yield Text("\n".join(lines))
        return
    if part.title:
        yield Text("\n".join(fold_text(part.title, width)))
    for number, widths in enumerate(groups):
        has_heading = any(column.heading for column in part.columns)
        grid = Table(
            box=None, pad_edge=False, padding=(0, len(gap), 0, 0), show_header=has_heading, header_style="bold"
        )
        for index, column_width in widths.items():
            column = part.columns[index]
            grid.add_column(Text(column.heading), width=column_width, justify="right" if column.right else "left")
        for place, row in enumerate(part.rows):
            folded = (fold_words(printable_text(row[index]), room) for index, room in widths.items())
            grid.add_row(*(Text("\n".join(lines)) for lines in folded), style=part.styles.get(place))
        yield from ([""] if number else [])
        yield grid
    if part.caption:
        yield Text("\n".join(fold_text(part.caption, width)))
