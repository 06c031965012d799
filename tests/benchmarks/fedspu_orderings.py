"""What the studies `deploy/studies/fedspu*.toml` say of the paper's orderings, as far as their cells have been run.

    python tests/benchmarks/fedspu_orderings.py runs/fedspu-study [--json]

Niu, Dong, Qin print the mean over all devices of the accuracy of what each device uses, on its own held-out data,
every device weighing as much as any other. It is read from the journals, of FedAvg as of the others. Methods are
compared over the seeds that both ran with in a setting, and where the grid has several learning rates, each by itself.
A claim that does not hold is told as such: it changes no exit code.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TypeAlias

import msgspec
from rich.console import Console
from rich.table import Table

from edge_server.journal.records import AnyRecord, Evaluated, closed_rounds, drop_void
from edge_server.plan.plan import Plan
from edge_server.replay.study.result import JOURNAL, RESULT, Result
from edge_server.report.digest import Digest

STOPPING = "-stopping"
OURS, REFERENCES = "fedspu", ("fedavg", "local_only")
DROPOUT = ("random_dropout", "fjord", "fjord_fixed", "hermes", "fedmp", "prunefl")
BASELINES = (*DROPOUT, "fedselect")
EQUAL_TRAFFIC = ("random_dropout",)
"""Methods that draw their neurons as FedSPU does, so that even the sum over a run must agree."""

POINTS, FEWER = 0.04, (0.25, 0.71)
"""By how much FedSPU is above the baselines' mean; by what share early stopping cuts its rounds."""

Key: TypeAlias = tuple[str, str, str]
"""Method, alpha, seed."""

Runs: TypeAlias = Mapping[Key, "Ran"]


@dataclass(frozen=True)
class Ran:
    """One run.

    Attributes:
        accuracy: Mean over devices, of the last evaluation.
        best: Likewise, of the best one.
        worst: Of the device that is served worst.
        curve: All evaluations, by round.
        rounds: How many there were.
        bytes_up, bytes_down: Of frames, of all rounds.
        seconds: That it took on the machine that ran it.
    """

    accuracy: float
    best: float
    worst: float
    curve: dict[int, float]
    rounds: int
    bytes_up: float
    bytes_down: float
    seconds: float


def curve_of(records: Iterable[AnyRecord]) -> dict[int, list[float]]:
    """Return what devices measured, by the round after which they did."""
    return {
        one.round: [found["eval_accuracy"] for found in one.by_device.values() if "eval_accuracy" in found]
        for one in drop_void(records)
        if isinstance(one, Evaluated) and one.round is not None
    }


def ran(records: Sequence[AnyRecord], digest: Digest, seconds: float) -> Ran | None:
    """Return what a run came to; None where no device evaluated."""
    shares = {number: found for number, found in curve_of(records).items() if found}
    if not shares:
        return None
    curve = {number: fmean(found) for number, found in shares.items()}
    until = digest.rounds[-1].until if digest.rounds else None
    return Ran(
        accuracy=curve[max(curve)],
        best=max(curve.values()),
        worst=min(shares[max(shares)]),
        curve=curve,
        rounds=len(closed_rounds(records)),
        bytes_up=until.bytes_up.value or 0.0 if until else 0.0,
        bytes_down=until.bytes_down.value or 0.0 if until else 0.0,
        seconds=seconds,
    )


def key_of(plan: Plan) -> Key:
    """Return of what setting a run is."""
    alpha = f"{plan.partition.alpha:g}" if plan.partition.kind == "dirichlet" else plan.partition.kind
    end = STOPPING if plan.algorithm.options.get("early_stopping") else ""
    return plan.algorithm.name + end, alpha, str(plan.seed)


def read(folder: Path) -> dict[float, dict[Key, Ran]]:
    """Return the runs of a study that have ended, by learning rate."""
    found: dict[float, dict[Key, Ran]] = {}
    for path in sorted(folder.glob(f"*/{RESULT}")):
        result = msgspec.json.decode(path.read_bytes(), type=Result)
        lines = (path.parent / JOURNAL).read_bytes().splitlines()
        records = [msgspec.json.decode(line, type=AnyRecord) for line in lines]
        plan = result.digest.plan
        if one := ran(records, result.digest, result.seconds):
            found.setdefault(plan.hyper.learning_rate, {})[key_of(plan)] = one
    return dict(sorted(found.items()))


def seeds_of(runs: Runs, method: str, alpha: str) -> set[str]:
    """Return the seeds that a method ran with in a setting."""
    return {seed for name, own, seed in runs if (name, own) == (method, alpha)}


def over_alphas(
    runs: Runs, methods: Sequence[str], alphas: Sequence[str], figure: str = "accuracy"
) -> list[float] | None:
    """Return every method's mean over the settings of its means over the seeds that all of them ran with there.

    None unless all of them ran with a common seed in every setting.
    """
    common = {alpha: set.intersection(*(seeds_of(runs, method, alpha) for method in methods)) for alpha in alphas}
    if not common or not all(common.values()):
        return None
    return [
        fmean(fmean(getattr(runs[method, alpha, seed], figure) for seed in seeds) for alpha, seeds in common.items())
        for method in methods
    ]


@dataclass(frozen=True)
class Claim:
    """Something that is claimed, and what the runs say of it: None where they say nothing."""

    said: str
    holds: bool | None
    figures: str = ""


def claims(runs: Runs) -> list[Claim]:
    """Return what holds, of the settings that FedSPU ran in."""
    alphas = sorted({alpha for method, alpha, _ in runs if method == OURS})
    stopped = sorted({alpha for method, alpha, _ in runs if method == OURS + STOPPING})
    found = [*_orderings(runs, alphas, ""), *_orderings(runs, stopped, STOPPING)]
    found += [_traffic(runs, other, alphas) for other in EQUAL_TRAFFIC]
    return found + _stopping(runs, [alpha for alpha in stopped if alpha in alphas])


def _orderings(runs: Runs, alphas: Sequence[str], end: str) -> list[Claim]:
    where = "with early stopping" if end else "without early stopping"
    found, above = [], []
    for name in (*BASELINES, *REFERENCES):
        other = name if name == "fedavg" else name + end  # FedAvg knows no stopping
        both = over_alphas(runs, (OURS + end, other), alphas)
        said = f"FedSPU above {name}, {where}"
        if both is None:
            found.append(Claim(said, None))
            continue
        ours, theirs = both
        found.append(Claim(said, ours > theirs, f"{100 * ours:.2f} against {100 * theirs:.2f}"))
        if name in BASELINES:
            above.append(ours - theirs)
    said = f"FedSPU {100 * POINTS:g} points above the baselines' mean, {where}"
    if not above:
        return [*found, Claim(said, None)]
    mean = fmean(above)
    return [
        *found,
        Claim(said, mean >= POINTS, f"{100 * mean:+.2f} points over {len(above)} of {len(BASELINES)} baselines"),
    ]


def _traffic(runs: Runs, other: str, alphas: Sequence[str]) -> Claim:
    said = f"traffic of FedSPU over that of {other} is 1.00 ± 0.01"
    ways = [over_alphas(runs, (OURS, other), alphas, way) for way in ("bytes_up", "bytes_down")]
    if None in ways:
        return Claim(said, None)
    ours, theirs = (sum(both) for both in zip(*ways, strict=True))
    return Claim(said, abs(ours / theirs - 1) <= 0.01, f"{ours / theirs:.4f}")


def _stopping(runs: Runs, alphas: Sequence[str]) -> list[Claim]:
    least, most = FEWER
    said = f"early stopping cuts FedSPU's rounds by {100 * least:g} to {100 * most:g} %"
    both = OURS, OURS + STOPPING
    rounds, shares = (over_alphas(runs, both, alphas, figure) for figure in ("rounds", "accuracy"))
    if rounds is None or shares is None:
        return [Claim(said, None)]
    (whole, short), (before, after) = rounds, shares
    fewer = 1 - short / whole
    return [
        Claim(said, least <= fewer <= most, f"{100 * fewer:.1f} %: {whole:.0f} to {short:.0f}"),
        Claim(
            "FedSPU without early stopping above that with it", before > after, f"{100 * (after - before):+.2f} points"
        ),
    ]


def spread(values: Sequence[float], unit: float = 100.0) -> str:
    """Return mean and standard deviation."""
    apart = f" ± {unit * stdev(values):.2f}" if len(values) > 1 else ""
    return f"{unit * fmean(values):.2f}{apart}"


def table(runs: Runs) -> Table:
    """Return one row a method and setting."""
    made = Table("method", "alpha", "runs", "accuracy, %", "best", "worst device", "rounds", box=None)
    for heading in ("MB up", "MB down", "s a run"):
        made.add_column(heading, justify="right")
    for method, alpha in dict.fromkeys((method, alpha) for method, alpha, _ in sorted(runs)):
        own = [one for (name, at, _), one in runs.items() if (name, at) == (method, alpha)]
        shares = [spread([getattr(one, name) for one in own]) for name in ("accuracy", "best", "worst")]
        sizes = [f"{fmean(getattr(one, name) for one in own) / 1e6:.2f}" for name in ("bytes_up", "bytes_down")]
        rounds = spread([one.rounds for one in own], 1.0)
        made.add_row(method, alpha, str(len(own)), *shares, rounds, *sizes, f"{fmean(one.seconds for one in own):.0f}")
    return made


def verdict(one: Claim) -> str:
    """Return a claim's verdict as a word."""
    return "not run" if one.holds is None else "yes" if one.holds else "NO"


def main() -> int:
    """Print a row a method and setting, and a row a claim."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", type=Path)
    parser.add_argument("--json", action="store_true", help="the runs with their curves, and the claims")
    options = parser.parse_args()
    by_rate = read(options.study)
    if options.json:
        cells = [
            {"learning_rate": rate, "method": m, "alpha": a, "seed": s, **asdict(one)}
            for rate, runs in by_rate.items()
            for (m, a, s), one in sorted(runs.items())
        ]
        said = {f"{rate:g}": [asdict(one) for one in claims(runs)] for rate, runs in by_rate.items()}
        sys.stdout.buffer.write(msgspec.json.encode({"cells": cells, "claims": said}))
        return 0
    console = Console(width=130)
    for rate, runs in by_rate.items():
        console.print(f"learning rate {rate:g}")
        console.print(table(runs))
        shown = Table("claim", "holds", "", box=None)
        for one in claims(runs):
            shown.add_row(one.said, verdict(one), one.figures)
        console.print(shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
