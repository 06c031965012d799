"""Energy by the meter at its usual rate against the full-rate integral."""

from __future__ import annotations

import math
import os
import statistics
import sys
from pathlib import Path
from random import Random

from measure import Figure, NotRun, Row
from rich.console import Console
from rich.table import Table

from tests.device_agent.sources import MIN_S, Trace, metered, traces

ROOT = Path(__file__).parents[2]
HERTZ, PHASES = 5.0, 40
BOUND, SHARE = 0.02, 0.95
RATES = (1.0, 2.0, 5.0, 10.0, 20.0)
GAP_S, GAP_SHARE = 1.5, 0.2
"""Gaps of so many seconds that take away a fifth of the time."""


def run(*, quick: bool = False) -> list[Row]:
    """Measure every run from many phases; print a table of workloads."""
    folder = ROOT / os.environ.get("FIELDFLEET_DATA", "../shared/data") / "power-traces"
    if not folder.is_dir():
        return [
            NotRun("energy", "the recorded power traces are absent; set FIELDFLEET_DATA to the folder of data sets")
        ]
    runs, phases = list(traces(folder)), 2 if quick else PHASES
    _show(runs, phases)
    errors = {one: _errors(runs, hertz=one, draws=phases) for one in RATES}
    whole, gaps = errors[HERTZ], _errors(runs, hertz=HERTZ, gap_s=GAP_S, draws=phases)
    windows = _errors([window for one in runs for window in one.windows(MIN_S)], hertz=HERTZ, draws=4)
    ratios = [error / told for error, told, _ in whole if told]
    figures = [
        Figure("energy: recorded runs of 10 s and more", len(runs), "runs"),
        Figure("energy at 5 Hz: within 2 % of the full rate", _within(whole), "of draws", f">= {SHARE}"),
        Figure(
            "energy at 5 Hz: runs whose typical draw is within 2 %",
            _runs_within(runs, phases),
            "of runs",
            f">= {SHARE}",
        ),
        Figure("energy at 5 Hz: every 10 s of every run within 2 %", _within(windows), "of draws", f">= {SHARE}"),
        Figure("energy at 5 Hz, a fifth lost in gaps: within 2 %", _within(gaps), "of draws"),
        Figure("energy at 5 Hz, a fifth lost: time told as covered", statistics.fmean(one[2] for one in gaps), "ratio"),
        Figure("energy at 5 Hz: error over told uncertainty, rms", math.hypot(*ratios) / math.sqrt(len(ratios)), "x"),
    ]
    return figures + [
        Figure(f"energy at {one:g} Hz: 95 % of errors below", _quantile(errors[one], SHARE), "ratio") for one in RATES
    ]


def _errors(
    runs: list[Trace], *, hertz: float, gap_s: float = 0.0, draws: int = PHASES
) -> list[tuple[float, float, float]]:
    """Return error, told uncertainty and covered share of every draw."""
    random, found = Random(5), []
    for trace in runs:
        joules = trace.joules
        for _ in range(draws):
            away = _away(trace, random, gap_s)
            one = metered(trace, random, hertz=hertz, lost=lambda at, away=away: any(a <= at < b for a, b in away))
            found.append((abs(one.joules / joules - 1), one.uncertainty or 0.0, one.covered_ratio))
    return found


def _away(trace: Trace, random: Random, gap_s: float) -> list[tuple[float, float]]:
    """Return when the source does not answer."""
    count = round(trace.seconds * GAP_SHARE / gap_s) if gap_s else 0
    begins = (trace.samples[0].at + random.random() * (trace.seconds - gap_s) for _ in range(count))
    return [(begin, begin + gap_s) for begin in begins]


def _within(errors: list[tuple[float, float, float]]) -> float:
    return statistics.fmean(error <= BOUND for error, _, _ in errors)


def _runs_within(runs: list[Trace], phases: int) -> float:
    medians = (statistics.median(error for error, _, _ in _errors([one], hertz=HERTZ, draws=phases)) for one in runs)
    return statistics.fmean(median <= BOUND for median in medians)


def _quantile(errors: list[tuple[float, float, float]], share: float) -> float:
    ordered = sorted(error for error, _, _ in errors)
    return ordered[math.ceil(share * len(ordered)) - 1]


def _show(runs: list[Trace], phases: int) -> None:
    table = Table("workload", "runs", "seconds", "watts", "flicker", "median error", "95 %", "within 2 %", box=None)
    for name in sorted({(one.suite, one.workload) for one in runs}):
        those = [one for one in runs if (one.suite, one.workload) == name]
        errors = _errors(those, hertz=HERTZ, draws=phases)
        watts = [sample.watts for one in those for sample in one.samples]
        table.add_row(
            " ".join(dict.fromkeys(name)),
            str(len(those)),
            f"{statistics.fmean(one.seconds for one in those):.0f}",
            f"{statistics.fmean(watts):.2f}",
            f"{statistics.pstdev(watts) / statistics.fmean(watts):.0%}",
            f"{_quantile(errors, 0.5):.2%}",
            f"{_quantile(errors, 0.95):.2%}",
            f"{_within(errors):.0%}",
        )
    Console(file=sys.stdout, width=110).print(table)
