"""A run's progress, read from its journal while the server writes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from edge_server.journal.outcome import REMEDY, TRIES_TO_WAIT, frequent_cause
from edge_server.journal.records import (
    AnyRecord,
    Evaluated,
    Gossiped,
    LeftOut,
    RoundClosed,
    RoundOpened,
    RunClosed,
    UpdateAccepted,
)
from edge_server.journal.sqlite import JOURNAL, read
from edge_server.report.progress_bar import NewsBar, print_line
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


class Display:
    """A bar of updates on a terminal, a line a round elsewhere; of several sites each has a bar among theirs."""

    def __init__(self, console: Console, rounds: int, site: str = "", bar: NewsBar | None = None) -> None:
        self._console, self._rounds, self._whose = console, rounds, f"{site}: " if site else ""
        self.bar = bar or NewsBar(console)
        self._task = self.bar.add_task(f"{self._whose}waiting for devices", total=rounds, news="")
        self._here, self._waiting, self._came = "", 0, 0
        self._asked: frozenset[str] = frozenset()
        self._missed, self._why = 0, ""

    def tell(self, record: AnyRecord) -> None:
        """Show one more record."""
        match record:
            case RoundOpened():
                self._here = f"round {record.round}, updates 0/{len(record.assignments)}"
                self._waiting, self._came = len(record.assignments), 0
                self._asked = frozenset(record.assignments)
            case UpdateAccepted():
                self._came += 1
                what = f"round {record.round}, updates {self._came}/{self._waiting}"
                self._here = what if record.round <= self._rounds else f"evaluating, {self._came} devices"
            case RoundClosed():
                self._close(record)
            case LeftOut():
                until = "it speaks" if record.silent else "its agent is started anew"
                why = f": {record.cause}" if record.silent else ""
                self._print(f"device {record.device} is asked no more until {until}{why}")
                return
            case Evaluated(round=int(number)):
                mean, kind = figure(record.accuracy), "own models" if record.personal else "the model"
                line = f"round {number}/{self._rounds}  {kind} on {len(record.by_device)} devices' own data: {mean}"
                self._print(line)
                return
            case Gossiped():
                self._mixed(record)
                return
            case _:
                return
        self.bar.update(self._task, description=f"{self._whose}{self._here}")

    def _print(self, line: str) -> None:
        print_line(self._console, f"{self._whose}{line}")

    def _mixed(self, gossip: Gossiped) -> None:
        """Show with whom a site mixed its model; on a terminal only if somebody was missing."""
        without = "".join(f"; without {site}: {cause}" for site, cause in gossip.off.items())
        if without or not self._console.is_terminal:
            self._print(f"mixed with {', '.join(gossip.on) or 'nobody'} in {gossip.seconds:.2f} s{without}")

    def _close(self, closed: RoundClosed) -> None:
        """Show how a round ended; of a missed one why, and after some in a row what to do."""
        self._came, is_missed = 0, closed.outcome == "missed"
        news = f"accuracy {figure(closed.accuracy)}  loss {figure(closed.loss)}"
        why = self._missed_why(closed) if is_missed else ""
        if is_missed:
            news = f"missed: {len(closed.arrived)} updates came{why}"
        self.bar.update(self._task, completed=closed.round, news=news)
        if not self._console.is_terminal or (is_missed and why != self._why):
            self._print(f"round {closed.round}/{self._rounds}  {news}  {closed.seconds:.2f} s")
        self._missed, self._why = self._missed + 1 if is_missed else 0, why
        if self._missed == TRIES_TO_WAIT:
            self._print(f"missed {self._missed} times one after the other: {REMEDY}")

    def _missed_why(self, closed: RoundClosed) -> str:
        if not self._asked:
            return "; no device could be asked"
        silent = sorted(self._asked - set(closed.arrived) - set(closed.failed))
        known = dict.fromkeys(silent, "no answer before the deadline") | closed.failed
        return f"; {frequent_cause(known)}" if known else ""
