"""A run's progress, read from its journal while the server writes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, Task
from rich.text import Text

from edge_server.journal.records import AnyRecord, Evaluated, RoundClosed, RoundOpened, RunClosed, UpdateAccepted
from edge_server.journal.sqlite import JOURNAL, read
from edge_server.trial.tables import figure

POLL_S = 0.1
BAR = 20
"""Characters of the bar."""


async def follow(folder: Path, tell: Callable[[AnyRecord], None]) -> RunClosed:
    """Hand every record to `tell` as it appears; return the one that ends the run."""
    seen = 0
    while True:
        for record in read(folder, seen) if (folder / JOURNAL).exists() else []:
            seen += 1
            tell(record)
            if isinstance(record, RunClosed):
                return record
        await asyncio.sleep(POLL_S)


class NewsBar(Progress):
    """A bar with a field for `news`, which stands below it where the terminal has no room beside it."""

    def __init__(self, console: Console) -> None:
        """Draw on a terminal; elsewhere nothing."""
        super().__init__(console=console, disable=not console.is_terminal)

    def get_renderables(self) -> Iterable[Text]:
        """Yield each task as one line or two."""
        return (_bar_text(task, self.console.width) for task in self.tasks)


def _bar_text(task: Task, width: int) -> Text:
    minutes, seconds = divmod(int(task.elapsed or 0), 60)
    done = round(BAR * task.percentage / 100)
    drawn = Text("\N{BOX DRAWINGS HEAVY HORIZONTAL}" * done, style="bar.complete")
    drawn.append("\N{BOX DRAWINGS LIGHT HORIZONTAL}" * (BAR - done), style="bar.back")
    count = f"{task.completed:.0f}/{task.total or 0:.0f}"
    parts = [Text(task.description), drawn, Text(count), Text(f"{minutes}:{seconds:02}", style="progress.elapsed")]
    if (left := _seconds_left(task)) is not None:
        parts.append(Text(f"about {left // 60}:{left % 60:02} left", style="progress.remaining"))
    news = Text(str(task.fields["news"]))
    line = Text("  ").join([*parts, news])
    return line if line.cell_len <= width else Text("\n").join([Text("  ").join(parts), Text("  ") + news])


def _seconds_left(task: Task) -> int | None:
    """Return how long the rounds to come take if they take as long as those that are done; None before the first."""
    if not task.completed or not task.total or task.elapsed is None or task.finished:
        return None
    return round(task.elapsed / task.completed * (task.total - task.completed))


def print_line(console: Console, line: str) -> None:
    """Print a line: on a terminal of whole words above a bar, elsewhere as one line of any length."""
    console.print(line, highlight=False, markup=False, soft_wrap=not console.is_terminal)


class Display:
    """A bar of updates on a terminal, a line a round elsewhere."""

    def __init__(self, console: Console, rounds: int) -> None:
        self._console, self._rounds = console, rounds
        self.bar = NewsBar(console)
        self._task = self.bar.add_task("waiting for devices", total=rounds, news="")
        self._here, self._waiting, self._came = "", 0, 0

    def tell(self, record: AnyRecord) -> None:
        """Show one more record."""
        match record:
            case RoundOpened():
                self._here = f"round {record.round}, updates 0/{len(record.assignments)}"
                self._waiting, self._came = len(record.assignments), 0
            case UpdateAccepted():
                self._came += 1
                what = f"round {record.round}, updates {self._came}/{self._waiting}"
                self._here = what if record.round <= self._rounds else f"evaluating, {self._came} devices"
            case RoundClosed():
                self._came = 0
                news = f"accuracy {figure(record.accuracy)}  loss {figure(record.loss)}"
                if record.outcome == "missed":
                    news = f"missed: {len(record.arrived)} updates came, {len(record.failed)} devices failed"
                self.bar.update(self._task, completed=record.round, news=news)
                if not self._console.is_terminal:
                    line = f"round {record.round}/{self._rounds}  {news}  {record.seconds:.2f} s"
                    print_line(self._console, line)
            case Evaluated(round=int(number)):
                mean, kind = figure(record.accuracy), "own models" if record.personal else "the model"
                line = f"round {number}/{self._rounds}  {kind} on {len(record.by_device)} devices' own data: {mean}"
                print_line(self._console, line)
                return
            case _:
                return
        self.bar.update(self._task, description=self._here)
