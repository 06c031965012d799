"""From a study's file to its summary on the terminal.

How far a study is, on standard error: a line that moves on a terminal, elsewhere a line a cell.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from collections.abc import Coroutine, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rich.console import Console

from edge_server.journal.runs import make_folder
from edge_server.replay.study.grid import Cell, cells
from edge_server.replay.study.pool import Tell, run_here
from edge_server.replay.study.result import Began, Ended, Order
from edge_server.replay.study.run import Runner, conduct, results_in
from edge_server.replay.study.spec import load
from edge_server.replay.study.summary import StudySummary
from edge_server.report.progress_bar import NewsBar, print_line
from shared.errors import ConfigError
from shared.protocol.units import SECONDS, choose_unit
from shared.runtime.clock import Clock, monotonic


class StudyDisplay:
    """Counts cells and reckons when the last will have ended."""

    def __init__(self, console: Console, total: int, done: int, clock: Clock = monotonic) -> None:
        """Show a study of `total` cells, of which an earlier call has done some."""
        self._console, self._clock, self._total = console, clock, total
        self._began, self._ended, self._failed, self._running = clock(), 0, 0, set[str]()
        self._left = total - done
        self.bar = NewsBar(console)
        self._task = self.bar.add_task("cells", total=total, completed=done, news="")

    def tell(self, news: Began | Ended) -> None:
        """Show that a cell has begun or ended."""
        if isinstance(news, Began):
            self._running.add(news.cell)
        else:
            self._running.discard(news.cell)
            self._ended += 1
            self._failed += bool(news.cause)
            self.bar.advance(self._task, 0 if news.cause else 1)
            if news.cause or not self._console.is_terminal:
                what = f"failed: {news.cause}" if news.cause else "done"
                print_line(self._console, f"{news.cell} {what}  ({self.status()})")
        self.bar.update(self._task, news=self.status())

    def status(self) -> str:
        """Return how many cells are done, run and failed, and how long the rest will take."""
        done = self._total - self._left + self._ended - self._failed
        parts = [f"{done}/{self._total} done", f"{len(self._running)} running", f"{self._failed} failed"]
        waiting = self._left - self._ended
        if self._ended and waiting:
            parts.append(f"about {_span((self._clock() - self._began) / self._ended * waiting)} left")
        return ", ".join(parts)


def _span(seconds: float) -> str:
    unit = choose_unit(seconds, SECONDS, between=("h", "s"))
    return f"{seconds / unit.size:.{1 if unit.name == 'h' else 0}f} {unit.name}"


def run_study(options: argparse.Namespace) -> tuple[StudySummary, Path, bool]:
    """Run a study; return its summary, its folder, and whether every cell that was asked for has ended by its plan.

    Raises:
        ConfigError: The study, a plan of it or the cluster cannot be used.
    """
    study, plan = load(options.study)
    grid = cells(study, plan, options.study, options.study.read_text("utf-8-sig"), options.data_root)
    if options.jobs < 0:
        raise ConfigError(f"--jobs {options.jobs}: give 1 or more, or leave it out for one a processor")
    chosen = [cell for cell in grid if not options.only or any(fnmatchcase(cell.name, one) for one in options.only)]
    if not chosen:
        known = ", ".join(dict.fromkeys(cell.variant or cell.name for cell in grid))
        raise ConfigError(f"--only {' '.join(options.only)}: no cell has such a name; they begin with {known}")
    folder = make_folder(options.data_dir) / study.name
    console = Console(stderr=True)
    done = len(results_in(folder, chosen))
    display = StudyDisplay(console, len(chosen), done)
    print_line(console, f"{study.name}: {len(chosen)} cells, {done} of them done before")
    with display.bar:
        try:
            summary = conduct(study, plan, grid, folder, _only(chosen, _runner(options)), display.tell)
        except (KeyboardInterrupt, asyncio.CancelledError):
            again = "the same command goes on, and keeps what is done"
            print_line(console, f"{study.name}: {display.status()}; {again}")
            raise
    names = {cell.name for cell in chosen}
    return summary, folder, all(row.ended for row in summary.rows if row.cell in names)


def _only(chosen: Sequence[Cell], run: Runner) -> Runner:
    """Return a runner that leaves the other cells for another time."""
    names = {cell.name for cell in chosen}
    return lambda orders, place, tell: run([order for order in orders if order.cell in names], place, tell)


def _runner(options: argparse.Namespace) -> Runner:
    def here(orders: Sequence[Order], place: Path, tell: Tell) -> None:
        asyncio.run(_ended_by_signals(run_here(orders, options.jobs or len(os.sched_getaffinity(0)), place, tell)))

    def away(orders: Sequence[Order], _: Path, tell: Tell) -> None:
        from edge_server.replay.study.ray_cluster import run_on_ray  # noqa: PLC0415 - Ray and the replay, only where asked for

        asyncio.run(_ended_by_signals(run_on_ray(options.ray, orders, options.jobs, tell)))

    return away if options.ray else here


async def _ended_by_signals(work: Coroutine[Any, Any, None]) -> None:
    """Await some work; the first Ctrl-C or SIGTERM ends it with all that it has started."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task

    def stop() -> None:
        if not task.cancelling():  # once is enough: another would cut the clearing up short
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    await work
