"""Terminal progress bar with a news field, for runs and studies."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.progress import Progress, Task
from rich.text import Text

BAR = 20
"""Width of the bar in characters."""


class NewsBar(Progress):
    """A bar with a `news` field, printed below it where the terminal is too narrow."""

    def __init__(self, console: Console) -> None:
        """Draw on a terminal only; elsewhere stay silent."""
        super().__init__(console=console, disable=not console.is_terminal)

    def get_renderables(self) -> Iterable[Text]:
        """Yield each task as one line or two."""
        return (_bar_text(task, self.console.width) for task in self.tasks)


def _bar_text(task: Task, width: int) -> Text:
    minutes, seconds = divmod(int(task.elapsed or 0), 60)
    done = round(BAR * task.percentage / 100)
    bar = Text("\N{BOX DRAWINGS HEAVY HORIZONTAL}" * done, style="bar.complete")
    bar.append("\N{BOX DRAWINGS LIGHT HORIZONTAL}" * (BAR - done), style="bar.back")
    count = f"{task.completed:.0f}/{task.total or 0:.0f}"
    parts = [Text(task.description), bar, Text(count), Text(f"{minutes}:{seconds:02}", style="progress.elapsed")]
    if (remaining_s := _seconds_left(task)) is not None:
        parts.append(Text(f"about {remaining_s // 60}:{remaining_s % 60:02} left", style="progress.remaining"))
    news = Text(str(task.fields["news"]))
    line = Text("  ").join([*parts, news])
    return line if line.cell_len <= width else Text("\n").join([Text("  ").join(parts), Text("  ") + news])


def _seconds_left(task: Task) -> int | None:
    """Return the remaining seconds extrapolated from the rounds done; None before the first."""
    if not task.completed or not task.total or task.elapsed is None or task.finished:
        return None
    return round(task.elapsed / task.completed * (task.total - task.completed))


def print_line(console: Console, line: str) -> None:
    """Print a line: wrapped at words on a terminal, unwrapped elsewhere."""
    console.print(line, highlight=False, markup=False, soft_wrap=not console.is_terminal)
