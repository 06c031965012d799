"""Terminal progress bar with a news field, for runs and studies."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

WIDE = 100
"""Columns of a terminal from which the news are beside the bar, not below it."""


class NewsBar(Progress):
    """A bar with a `news` field, on a terminal only; elsewhere it is silent."""

    def __init__(self, console: Console) -> None:
        columns = [TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), MofNCompleteColumn()]
        columns += [TimeElapsedColumn(), TimeRemainingColumn(compact=True)]
        if console.width >= WIDE:
            columns.append(TextColumn("{task.fields[news]}", markup=False))
        super().__init__(*columns, console=console, disable=not console.is_terminal)

    def get_renderables(self) -> Iterator[RenderableType]:
        """Yield the bar of each task, and its news where they are below."""
        for task in self.tasks:
            yield self.make_tasks_table([task])
            if self.console.width < WIDE:
                yield Text(f"  {task.fields['news']}")


def print_line(console: Console, line: str) -> None:
    """Print a line: wrapped at words on a terminal, unwrapped elsewhere."""
    console.print(line, highlight=False, markup=False, soft_wrap=not console.is_terminal)
