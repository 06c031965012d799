"""Progress of a run for a caller: a text bar or a callback."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TextIO, TypeAlias

from edge_server.journal.compared import server_value
from edge_server.journal.compared_metric import ACCURACY, ComparedMetric
from edge_server.journal.records import AnyRecord, RoundClosed, RunOpened
from shared.runtime.clock import Clock, monotonic

BAR = 20
"""Width of the bar in characters."""
EVERY_S = 5.0
"""Seconds between lines where a line cannot be drawn over."""
FULL, EMPTY = "\N{FULL BLOCK}", "\N{LIGHT SHADE}"


@dataclass(frozen=True)
class RoundProgress:
    """State of a run at its beginning and after each round.

    Attributes:
        run: Name of the run.
        round: Number of the round that has ended; 0 at the beginning.
        rounds: Number of rounds of the plan.
        outcome: `aggregated` or `missed`; empty at the beginning.
        accuracy: On the server's test data; None if not evaluated.
        metric: Metric by which the run's models are compared.
        value: This metric on the server's test data; None if not evaluated.
        loss: Mean training loss of the devices; None if no device reported one.
        seconds: Length of the round, wall or virtual.
    """

    run: str
    round: int
    rounds: int
    outcome: str = ""
    accuracy: float | None = None
    loss: float | None = None
    seconds: float = 0.0
    metric: ComparedMetric = ACCURACY
    value: float | None = None

    def __str__(self) -> str:
        """Return a line for people."""
        parts = [f"{self.run}  round {self.round}/{self.rounds}", self.outcome if self.outcome == "missed" else ""]
        parts += [] if self.value is None else [f"{self.metric.name} {self.metric.format(self.value)}"]
        parts += [] if self.loss is None else [f"loss {self.loss:.4f}"]
        return "  ".join(filter(None, parts))


ProgressOption: TypeAlias = "bool | Callable[[RoundProgress], object]"


class RecordReader:
    """Turns the records of one run into progress for a callback."""

    def __init__(self, report: Callable[[RoundProgress], object]) -> None:
        self._report = report
        self._progress = RoundProgress("", 0, 0)

    def take(self, record: AnyRecord) -> None:
        """Report a record if it begins the run or ends a round."""
        match record:
            case RunOpened():
                metric = record.compared or ACCURACY
                self._progress = RoundProgress(record.run, 0, record.plan.rounds, metric=metric)
            case RoundClosed():
                self._progress = replace(
                    self._progress,
                    round=record.round,
                    outcome=record.outcome,
                    accuracy=record.accuracy,
                    loss=record.loss,
                    seconds=record.seconds,
                    value=server_value(record, self._progress.metric),
                )
            case _:
                return
        self._report(self._progress)


class TextBar:
    """Bar on a terminal or in a notebook, which is drawn over; elsewhere a line every few seconds."""

    def __init__(self, out: TextIO | None = None, *, is_live: bool | None = None, clock: Clock = monotonic) -> None:
        """Choose the stream: a notebook's output, else standard error.

        Args:
            is_live: Whether a line can be drawn over; None to find out.
        """
        notebook = in_notebook()
        self._out = out or (sys.stdout if notebook else sys.stderr)
        self._is_live = (notebook or self._out.isatty()) if is_live is None else is_live
        self._clock, self._printed_at, self._width = clock, -EVERY_S, 0

    def show(self, progress: RoundProgress) -> None:
        """Draw the state of the run."""
        text = f"{draw_bar(progress)}  {progress}"
        if self._is_live:
            self._out.write(f"\r{text.ljust(self._width)}")
            self._width = len(text)
        elif self._clock() - self._printed_at >= EVERY_S or progress.round == progress.rounds:
            self._printed_at = self._clock()
            self._out.write(f"{progress}\n")
        self._out.flush()

    def end(self) -> None:
        """Leave the bar's line."""
        if self._width:
            self._out.write("\n")
            self._out.flush()


def draw_bar(progress: RoundProgress) -> str:
    """Return the share of ended rounds as a bar."""
    done = BAR * progress.round // max(1, progress.rounds)
    return FULL * done + EMPTY * (BAR - done)


def in_notebook() -> bool:
    """Check whether this process is the kernel of a notebook."""
    kernel = sys.modules.get("ipykernel.zmqshell")
    shell = sys.modules.get("IPython")
    return kernel is not None and shell is not None and isinstance(shell.get_ipython(), kernel.ZMQInteractiveShell)
