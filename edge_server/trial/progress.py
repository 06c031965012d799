"""A run's progress, read from its journal while the server writes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from edge_server.journal.records import AnyRecord, Evaluated, RoundClosed, RoundOpened, RunClosed, UpdateAccepted
from edge_server.journal.sqlite import JOURNAL, read
from edge_server.trial.tables import figure

POLL_S = 0.1


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


def bar(console: Console) -> Progress:
    """Return a bar with a field for `news`; on what is no terminal nothing is drawn."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[news]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )


class Display:
    """A bar of updates on a terminal, a line a round elsewhere."""

    def __init__(self, console: Console, rounds: int) -> None:
        self._console, self._rounds = console, rounds
        self.bar = bar(console)
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
                self.bar.update(self._task, completed=record.round, news=news)
                if not self._console.is_terminal:
                    line = f"round {record.round}/{self._rounds}  {news}  {record.seconds:.2f} s"
                    self._console.print(line, highlight=False)
            case Evaluated(round=int(number)):
                mean, kind = figure(record.accuracy), "own models" if record.personal else "the model"
                line = f"round {number}/{self._rounds}  {kind} on {len(record.by_device)} devices' own data: {mean}"
                self._console.print(line, highlight=False)
                return
            case _:
                return
        self.bar.update(self._task, description=self._here)
