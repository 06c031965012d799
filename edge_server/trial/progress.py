"""Live progress display of a run, read from its journal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from edge_server.journal.compared import compared_metric, devices_value, is_personal, server_value
from edge_server.journal.compared_metric import ACCURACY
from edge_server.journal.outcome import REMEDY, TRIES_TO_WAIT, frequent_cause
from edge_server.journal.records import (
    AnyRecord,
    Evaluated,
    Gossiped,
    LeftOut,
    RoundClosed,
    RoundOpened,
    RunClosed,
    RunOpened,
    UpdateAccepted,
)
from edge_server.journal.sqlite import JOURNAL, read_records
from edge_server.report.progress_bar import NewsBar, print_line
from edge_server.trial.tables import format_number

POLL_S = 0.1


async def follow(folder: Path, tell: Callable[[AnyRecord], None]) -> RunClosed:
    """Pass every record to `tell` as it appears; return the final one."""
    count = 0
    while True:
        for record in read_records(folder, count) if (folder / JOURNAL).exists() else []:
            count += 1
            tell(record)
            if isinstance(record, RunClosed):
                return record
        await asyncio.sleep(POLL_S)


class Display:
    """Progress bar of updates on a terminal, one line per round elsewhere; each site has its own bar."""

    def __init__(self, console: Console, rounds: int, site: str = "", bar: NewsBar | None = None) -> None:
        self._console, self._rounds, self._prefix = console, rounds, f"{site}: " if site else ""
        self.bar = bar or NewsBar(console)
        self._task = self.bar.add_task(f"{self._prefix}waiting for devices", total=rounds, news="")
        self._status, self._expected, self._arrived = "", 0, 0
        self._selected: frozenset[str] = frozenset()
        self._missed, self._cause = 0, ""
        self._opening = list[AnyRecord]()

    def tell(self, record: AnyRecord) -> None:
        """Show one more record."""
        if isinstance(record, RunOpened):
            self._opening = [record]
        match record:
            case RoundOpened():
                self._status = f"round {record.round}, updates 0/{len(record.assignments)}"
                self._expected, self._arrived = len(record.assignments), 0
                self._selected = frozenset(record.assignments)
            case UpdateAccepted():
                self._arrived += 1
                status = f"round {record.round}, updates {self._arrived}/{self._expected}"
                self._status = status if record.round <= self._rounds else f"evaluating, {self._arrived} devices"
            case RoundClosed():
                self._close(record)
            case LeftOut():
                until = "it sends a message" if record.silent else "its agent restarts"
                self._print(f"device {record.device} gets no more tasks until {until}: {record.cause}")
                return
            case Evaluated(round=int()):
                self._show_evaluation(record)
                return
            case Gossiped():
                self._show_mixing(record)
                return
            case _:
                return
        self.bar.update(self._task, description=f"{self._prefix}{self._status}")

    def _show_evaluation(self, record: Evaluated) -> None:
        """Show the compared metric on the devices' held-out examples."""
        metric, kind = compared_metric(self._opening), "personal models" if record.personal else "the model"
        mean = ("" if metric == ACCURACY else f"{metric.name} ") + metric.format(devices_value(record, metric))
        where = f"{kind} on {len(record.by_device)} devices' local data"
        self._print(f"round {record.round}/{self._rounds}  {where}: {mean}")

    def _print(self, line: str) -> None:
        print_line(self._console, f"{self._prefix}{line}")

    def _show_mixing(self, gossip: Gossiped) -> None:
        """Show which sites a site mixed with; on a terminal only if one was missing."""
        without = "".join(f"; without {site}: {cause}" for site, cause in gossip.off.items())
        if without or not self._console.is_terminal:
            self._print(f"mixed with {', '.join(gossip.on) or 'nobody'} in {gossip.seconds:.2f} s{without}")

    def _close(self, closed: RoundClosed) -> None:
        """Show how a round ended; for a missed one the cause, and after several in a row the remedy."""
        self._arrived, is_missed = 0, closed.outcome == "missed"
        metric = compared_metric(self._opening)
        value, on_devices, where = server_value(closed, metric), devices_value(closed, metric), ""
        if value is None and on_devices is not None:  # of the model that a round begins with, or of personal models
            value, where = on_devices, " on devices" if is_personal(self._opening) else " on devices before it"
        news = f"{metric.name}{where} {metric.format(value)}  loss {format_number(closed.loss)}"
        cause = self._missed_why(closed) if is_missed else ""
        if is_missed:
            news = f"missed: {len(closed.arrived)} updates came{cause}"
        self.bar.update(self._task, completed=closed.round, news=news)
        if not self._console.is_terminal or (is_missed and cause != self._cause):
            self._print(f"round {closed.round}/{self._rounds}  {news}  {closed.seconds:.2f} s")
        self._missed, self._cause = self._missed + 1 if is_missed else 0, cause
        if self._missed == TRIES_TO_WAIT:
            self._print(f"missed {self._missed} times in a row: {REMEDY}")

    def _missed_why(self, closed: RoundClosed) -> str:
        if not self._selected:
            return "; no device was selected"
        silent_devices = sorted(self._selected - set(closed.arrived) - set(closed.failed))
        causes = dict.fromkeys(silent_devices, "no answer before the deadline") | closed.failed
        return f"; {frequent_cause(causes)}" if causes else ""
