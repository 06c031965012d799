"""Progress display of a study, as a bar or as lines."""

from __future__ import annotations

from rich.console import Console

from edge_server.replay.study.result import CellEnded, CellStarted
from edge_server.report.progress_bar import NewsBar, print_line
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
