"""Comparison of two runs, such as a live run and its replay."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from markupsafe import Markup

from edge_server.api.figures import RunFigure
from edge_server.api.runs import Run, make_frame
from edge_server.journal.runs import StoredRun
from edge_server.replay.comparison.compare import Gap
from edge_server.replay.comparison.compare_page import render_errors
from edge_server.replay.comparison.compare_text import lines, table
from edge_server.replay.comparison.stored_runs import gap_between_runs
from edge_server.report.html import macro, render_fragment
from shared.runtime.text_table import write_text

if TYPE_CHECKING:
    import pandas as pd


class Comparison:
    """Differences of two runs by round, task and figure.

    Attributes:
        gap: Pairs of values, their relative errors, and whether models and payloads have the same bits.
    """

    def __init__(self, first: Run, second: Run, gap: Gap) -> None:
        self._runs, self.gap = (first, second), gap

    @property
    def same_model(self) -> bool | None:
        """True if the final parameters have identical bits; None if that is unknown."""
        return None if self.gap.model == "unknown" else self.gap.model == "same"

    def frame(self) -> pd.DataFrame:
        """Return the relative errors of each figure, (second - first) / first, as a pandas data frame.

        Raises:
            ConfigError: pandas is not installed.
        """
        return make_frame(self.gap.spreads)

    def figure(self) -> RunFigure:
        """Return the report's curves of both runs."""
        return RunFigure([run.digest for run in self._runs])

    def __str__(self) -> str:
        text = io.StringIO()
        write_text(text, [table(self.gap.spreads), *lines(self.gap)])
        return text.getvalue()

    def __repr__(self) -> str:
        first, second = (run.name for run in self._runs)
        return f"<Comparison of {first} and {second}: {self.gap.rounds} rounds, final model {self.gap.model}>"

    def _repr_html_(self) -> str:
        facts = macro("items")(lines(self.gap))
        return render_fragment(Markup("{}{}").format(facts, render_errors(self.gap.spreads)))


def compare(first: Run, second: Run) -> Comparison:
    """Compare two runs; rounds and tasks are matched by their numbers and devices.

    Args:
        first: Reference of relative errors, such as the recorded run.
        second: The other run, such as a replay of it.

    Raises:
        ConfigError: A journal lacks the start of its run.
    """
    recorded, replayed = (StoredRun(run.folder, run.records) for run in (first, second))
    return Comparison(first, second, gap_between_runs(recorded, replayed))
