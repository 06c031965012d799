"""Run a study from the command line, with its progress as a bar or as lines."""

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

from edge_server.journal.runs import create_runs_folder
from edge_server.replay.study.grid import Cell, build_cells
from edge_server.replay.study.pool import Tell, run_locally
from edge_server.replay.study.result import CellEnded, CellStarted, Order
from edge_server.replay.study.run import Runner, complete_study, results_in
from edge_server.replay.study.spec import load
from edge_server.replay.study.summary import StudySummary, is_complete
from edge_server.report.progress_bar import NewsBar, print_line
from shared.errors import ConfigError
from shared.protocol.units import SECONDS, choose_unit
from shared.runtime.clock import Clock, monotonic


class StudyDisplay:
    """Count cells and estimate the remaining time."""

    def __init__(self, console: Console, total: int, done: int, clock: Clock = monotonic) -> None:
        """Show a study of `total` cells, `done` of which an earlier call completed."""
        self._console, self._clock, self._total = console, clock, total
        self._began, self._ended, self._failed, self._running = clock(), 0, 0, set[str]()
        self._left = total - done
        self.bar = NewsBar(console)
        self._task = self.bar.add_task("cells", total=total, completed=done, news="")

    def tell(self, news: CellStarted | CellEnded) -> None:
        """Show the start or end of a cell."""
        if isinstance(news, CellStarted):
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
        """Return the number of done, running and failed cells, and the estimated remaining time."""
        done = self._total - self._left + self._ended - self._failed
        parts = [f"{done}/{self._total} done", f"{len(self._running)} running", f"{self._failed} failed"]
        remaining = self._left - self._ended
        if self._ended and remaining:
            parts.append(f"about {_span((self._clock() - self._began) / self._ended * remaining)} left")
        return ", ".join(parts)


def _span(seconds: float) -> str:
    unit = choose_unit(seconds, SECONDS, between=("h", "s"))
    return f"{seconds / unit.size:.{1 if unit.name == 'h' else 0}f} {unit.name}"


def run_study(options: argparse.Namespace) -> tuple[StudySummary, Path, bool]:
    """Run a study; return its summary, its folder, and whether every selected cell is complete.

    Raises:
        ConfigError: The study, a plan of it or the cluster cannot be used.
    """
    study, plan = load(options.study)
    grid = build_cells(study, plan, options.study, options.study.read_text("utf-8-sig"), options.data_root)
    if options.jobs < 0:
        raise ConfigError(f"--jobs {options.jobs}: give 1 or more, or leave it out for one per core")
    chosen = [cell for cell in grid if not options.only or any(fnmatchcase(cell.name, glob) for glob in options.only)]
    if not chosen:
        names_text = ", ".join(dict.fromkeys(cell.variant or cell.name for cell in grid))
        raise ConfigError(f"--only {' '.join(options.only)}: no cell matches; names start with {names_text}")
    folder = create_runs_folder(options.data_dir) / study.name
    console = Console(stderr=True)
    done = len(results_in(folder, chosen))
    display = StudyDisplay(console, len(chosen), done)
    print_line(console, f"{study.name}: {len(chosen)} cells, {done} of them done before")
    with display.bar:
        try:
            summary = complete_study(study, plan, grid, folder, _select_cells(chosen, _runner(options)), display.tell)
        except (KeyboardInterrupt, asyncio.CancelledError):
            again = "run the same command to continue"
            print_line(console, f"{study.name}: {display.status()}; {again}")
            raise
    names = {cell.name for cell in chosen}
    return summary, folder, all(is_complete(row) for row in summary.rows if row.cell in names)


def _select_cells(chosen: Sequence[Cell], run: Runner) -> Runner:
    """Return a runner restricted to the chosen cells."""
    names = {cell.name for cell in chosen}
    return lambda orders, place, tell: run([order for order in orders if order.cell in names], place, tell)


def _runner(options: argparse.Namespace) -> Runner:
    def run_on_machine(orders: Sequence[Order], place: Path, tell: Tell) -> None:
        asyncio.run(_cancel_on_signals(run_locally(orders, options.jobs or len(os.sched_getaffinity(0)), place, tell)))

    def run_on_cluster(orders: Sequence[Order], _: Path, tell: Tell) -> None:
        from edge_server.replay.study.ray_cluster import run_on_ray  # noqa: PLC0415 - imports Ray and the replay

        asyncio.run(_cancel_on_signals(run_on_ray(options.ray, orders, options.jobs, tell)))

    return run_on_cluster if options.ray else run_on_machine


async def _cancel_on_signals(work: Coroutine[Any, Any, None]) -> None:
    """Await a coroutine; the first Ctrl-C or SIGTERM cancels it."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task

    def stop() -> None:
        if not task.cancelling():  # a second signal would interrupt the cleanup
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    await work
