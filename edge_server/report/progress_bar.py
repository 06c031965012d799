"""Terminal progress bar with a news field, for runs and studies."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column


class NewsBar(Progress):
    """A bar with a `news` field, which folds where the terminal is too narrow."""

    def __init__(self, console: Console) -> None:
        """Draw on a terminal only; elsewhere stay silent."""
        times = TimeElapsedColumn(), TimeRemainingColumn(compact=True)
        news = TextColumn("{task.fields[news]}", table_column=Column(overflow="fold"), markup=False)
        name = TextColumn("{task.description}", markup=False)
        columns = name, BarColumn(bar_width=20), MofNCompleteColumn(), *times, news
        super().__init__(*columns, console=console, disable=not console.is_terminal)


def print_line(console: Console, line: str) -> None:
    """Print a line: wrapped at words on a terminal, unwrapped elsewhere."""
    console.print(line, highlight=False, markup=False, soft_wrap=not console.is_terminal)
