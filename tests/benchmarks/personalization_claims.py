"""What the study `deploy/studies/pruned_personalization.toml` says of the paper's claims, and its table of latencies.

    python tests/benchmarks/personalization_claims.py runs/pruned_personalization-study

Liu et al. print curves and one table of milliseconds. Accuracies here are of every device's own network on examples of
its own; a task's latency is what it computes and uploads, as (24) has it, of the slowest device. A claim that does not
hold is told as such: it changes no exit code.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TypeAlias

import msgspec
from rich.console import Console
from rich.table import Table

from edge_server.journal.costs import costs_by_round
from edge_server.journal.records import AnyRecord, Evaluated, RoundOpened, RunOpened, UpdateAccepted
from edge_server.replay.study.result import JOURNAL, RESULT

POINT = 0.01
"""Of accuracy."""
SETTLED = 3
"""Rounds after which the server has measured what it decides by."""
PAPER_MS = {"proposed": "25", "equal-ratio": "38 ± .45", "fedalt": "55 ± .55", "pruning_only": "45"}
"""Table I: which of two readings of equal resources is meant follows from its milliseconds being no threshold."""


Runs: TypeAlias = dict[str, dict[int, "Run"]]
"""By variant and seed."""


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        accuracy: Of the devices' own networks after the last round, their mean.
        worst: Of the worst device.
        mb_up: Megabytes of updates in a round.
        ms: Milliseconds that the slowest device computes and uploads, mean over settled rounds.
        most_ms: Of the slowest settled round.
        threshold_ms: T_th.
        pruned: Mean share over settled rounds and devices.
    """

    accuracy: float
    worst: float
    mb_up: float
    ms: float
    most_ms: float
    threshold_ms: float
    pruned: float


def run_of(records: Sequence[AnyRecord]) -> Run:
    """Return what a run came to."""
    plan = next(record.plan for record in records if isinstance(record, RunOpened))
    last = [record for record in records if isinstance(record, Evaluated)][-1]
    costs = costs_by_round(records)
    slowest = [
        1000 * max((cost.compute_s or 0.0) + (cost.upload_s or 0.0) for cost in costs[number].values())
        for number in sorted(costs)
        if SETTLED < number <= plan.rounds
    ]
    sizes = [one.update.params.size for one in records if isinstance(one, UpdateAccepted) and one.update.params]
    told = [one for one in records if isinstance(one, RoundOpened) and one.round > SETTLED]
    pruned = [float(one.values.get("prune", 0.0)) for opened in told for one in opened.assignments.values()]  # type: ignore[arg-type]
    own = [figures["eval_accuracy"] for figures in last.by_device.values() if "eval_accuracy" in figures]
    threshold = plan.optimizer.options.get("deadline_s", 0.0) if plan.optimizer else 0.0
    return Run(
        accuracy=fmean(own),
        worst=min(own),
        mb_up=sum(sizes) / plan.rounds / 1e6,
        ms=fmean(slowest),
        most_ms=max(slowest),
        threshold_ms=1000 * float(threshold),
        pruned=fmean(pruned),
    )


def read(folder: Path) -> dict[str, Runs]:
    """Return the runs of a study that have ended, by data set."""
    found: dict[str, Runs] = {}
    for path in sorted(folder.glob(f"*/{RESULT}")):
        with (path.parent / JOURNAL).open("rb") as file:
            records = [msgspec.json.decode(line, type=AnyRecord) for line in file]
        plan = next(record.plan for record in records if isinstance(record, RunOpened))
        runs = found.setdefault(Path(plan.data.path).name, {})
        runs.setdefault(path.parent.name.partition("_path-")[0], {})[plan.seed] = run_of(records)
    return found


def spread(values: Sequence[float], unit: float = 100.0) -> str:
    """Return mean and standard deviation."""
    apart = f" ± {unit * stdev(values):.1f}" if len(values) > 1 else ""
    return f"{unit * fmean(values):.1f}{apart}"


def means(runs: Runs, variants: Sequence[str], figure: str) -> list[float] | None:
    """Return every variant's mean of a figure over the seeds that all of them ran with, None where there is none."""
    seeds = set.intersection(*(set(runs.get(variant, {})) for variant in variants))
    return [fmean(getattr(runs[variant][seed], figure) for seed in seeds) for variant in variants] if seeds else None


def above(runs: Runs, better: str, worse: str, slack: float = 0.0) -> str:
    """Return whether one variant is at least as accurate as another, less `slack`."""
    if (both := means(runs, (better, worse), "accuracy")) is None:
        return "not run"
    one, other = both
    return f"{'yes' if one >= other - slack else 'NO'}: {100 * (one - other):+.2f} points"


def saved(runs: Runs) -> str:
    """Return whether the proposed scheme sends half of what partial personalization does, within five points."""
    if (both := means(runs, ("proposed", "fedalt"), "mb_up")) is None:
        return "not run"
    less = 1 - both[0] / both[1]
    return f"{'yes' if abs(less - 0.5) <= 5 * POINT else 'NO'}: {100 * less:.1f} % less"


def in_time(runs: Runs) -> str:
    """Return whether no settled round of the proposed scheme takes longer than T_th."""
    if "proposed" not in runs:
        return "not run"
    most = max(run.most_ms / run.threshold_ms for run in runs["proposed"].values())
    return f"{'yes' if most <= 1 else 'NO'}: {most:.3f} T_th at most"


def rises(runs: Runs, figure: str, sign: float = 1.0) -> str:
    """Return whether a figure rises with T_th, or falls."""
    steps = ["threshold-250", "proposed", "threshold-400", "threshold-500"]
    if (values := means(runs, steps, figure)) is None:
        return "not run"
    holds = all(sign * after >= sign * before for before, after in itertools.pairwise(values))
    return f"{'yes' if holds else 'NO'}: " + ", ".join(f"{value:.3f}" for value in values)


def main() -> int:
    """Print a table of variants and one of claims for each data set."""
    console = Console(width=130)
    for name, runs in read(Path(sys.argv[1])).items():
        table = Table(
            "variant", "runs", "accuracy", "worst", "pruned", "MB up a round", "ms", "most ms", "T_th", "Table I"
        )
        for variant, by_seed in runs.items():
            own = list(by_seed.values())
            shares = [spread([getattr(run, figure) for run in own]) for figure in ("accuracy", "worst", "pruned")]
            plain = [spread([getattr(run, figure) for run in own], 1.0) for figure in ("mb_up", "ms", "most_ms")]
            threshold = f"{own[0].threshold_ms:.0f}"
            table.add_row(variant, str(len(own)), *shares, *plain, threshold, PAPER_MS.get(variant, ""))
        claims = Table("claim", "holds")
        claims.add_row("accuracy within a point of partial personalization", above(runs, "proposed", "fedalt", POINT))
        claims.add_row("half of its upload, within 5 points", saved(runs))
        claims.add_row("above equal resources, ratios for T_th", above(runs, "proposed", "equal-latency"))
        claims.add_row("above equal resources, ratios as proposed", above(runs, "proposed", "equal-ratio"))
        claims.add_row("above pruning only", above(runs, "proposed", "pruning_only"))
        claims.add_row("FedAlt at least FedSim, nothing pruned", above(runs, "fedalt", "fedsim"))
        claims.add_row("FedAlt at least FedSim, pruned", above(runs, "proposed", "proposed-fedsim"))
        claims.add_row("no settled round longer than T_th", in_time(runs))
        claims.add_row("a larger T_th: less is pruned", rises(runs, "pruned", -1.0))
        claims.add_row("a larger T_th: more accurate", rises(runs, "accuracy"))
        claims.add_row("a larger T_th: more traffic", rises(runs, "mb_up"))
        console.print(f"\n{name}", style="bold")
        console.print(table)
        console.print(claims)
    return 0


if __name__ == "__main__":
    sys.exit(main())
