"""What the studies `deploy/studies/fedspu*.toml` say of the paper's orderings, as far as their cells have been run.

    python tests/benchmarks/fedspu_orderings.py runs/fedspu-study [--json]

Niu, Dong, Qin print the mean over all devices of the accuracy of what each device uses, on its own held-out data,
every device weighing as much as any other. It is read from the journals, of FedAvg as of the others. A claim that does
not hold is told as such: it changes no exit code.
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

from edge_server.report.digest import Digest
from edge_server.store.base import AnyRecord, Evaluated, closed_rounds, valid
from edge_server.study.result import JOURNAL, RESULT, Result

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
        for one in valid(records)
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


def key_of(result: Result, variant: str) -> Key:
    """Return of what setting a run is."""
    plan = result.digest.plan
    alpha = f"{plan.partition.alpha:g}" if plan.partition.kind == "dirichlet" else plan.partition.kind
    return variant, alpha, str(plan.seed)


def read(folder: Path) -> dict[Key, Ran]:
    """Return the runs of a study that have ended."""
    found: dict[Key, Ran] = {}
    for path in sorted(folder.glob(f"*/{RESULT}")):
        result = msgspec.json.decode(path.read_bytes(), type=Result)
        lines = (path.parent / JOURNAL).read_bytes().splitlines()
        records = [msgspec.json.decode(line, type=AnyRecord) for line in lines]
        variant = path.parent.name.partition("_alpha-")[0].partition("_seed-")[0]
        if one := ran(records, result.digest, result.seconds):
            found[key_of(result, variant)] = one
    return found


def mean_of(runs: Mapping[Key, Ran], method: str, alpha: str, figure: str = "accuracy") -> float | None:
    """Return a figure's mean over the seeds of a setting."""
    found = [getattr(one, figure) for (name, own, _), one in runs.items() if (name, own) == (method, alpha)]
    return fmean(found) if found else None


def over_alphas(runs: Mapping[Key, Ran], method: str, alphas: Sequence[str], figure: str = "accuracy") -> float | None:
    """Return the mean of the settings' means, None unless the method ran in all of them."""
    found = [mean_of(runs, method, alpha, figure) for alpha in alphas]
    return fmean(one for one in found if one is not None) if found and None not in found else None


@dataclass(frozen=True)
class Claim:
    """Something that is claimed, and what the runs say of it: None where they say nothing."""

    said: str
    holds: bool | None
    figures: str = ""


def claims(runs: Mapping[Key, Ran]) -> list[Claim]:
    """Return what holds, of the settings that FedSPU ran in."""
    alphas = sorted({alpha for method, alpha, _ in runs if method == OURS})
    stopped = sorted({alpha for method, alpha, _ in runs if method == OURS + STOPPING})
    found = [*_orderings(runs, alphas, ""), *_orderings(runs, stopped, STOPPING)]
    found += [_traffic(runs, other, alphas) for other in EQUAL_TRAFFIC]
    return found + _stopping(runs, [alpha for alpha in stopped if alpha in alphas])


def _orderings(runs: Mapping[Key, Ran], alphas: Sequence[str], end: str) -> list[Claim]:
    where = "with early stopping" if end else "without early stopping"
    ours = over_alphas(runs, OURS + end, alphas)
    others = {name: over_alphas(runs, name + end, alphas) for name in BASELINES}
    known = {name: one for name, one in others.items() if one is not None}
    found = []
    for name in (*BASELINES, *REFERENCES):
        other = over_alphas(runs, name if name == "fedavg" else name + end, alphas)  # FedAvg knows no stopping
        said = f"FedSPU above {name}, {where}"
        if ours is None or other is None:
            found.append(Claim(said, None))
        else:
            found.append(Claim(said, ours > other, f"{100 * ours:.2f} against {100 * other:.2f}"))
    said = f"FedSPU {100 * POINTS:g} points above the baselines' mean, {where}"
    if ours is None or not known:
        return [*found, Claim(said, None)]
    mean = fmean(known.values())
    figures = f"{100 * (ours - mean):+.2f} points over {len(known)} of {len(BASELINES)} baselines"
    return [*found, Claim(said, ours - mean >= POINTS, figures)]


def _traffic(runs: Mapping[Key, Ran], other: str, alphas: Sequence[str]) -> Claim:
    said = f"traffic of FedSPU over that of {other} is 1.00 ± 0.01"
    sums = [[over_alphas(runs, name, alphas, way) for way in ("bytes_up", "bytes_down")] for name in (OURS, other)]
    if any(one is None for pair in sums for one in pair):
        return Claim(said, None)
    ours, theirs = (sum(one or 0.0 for one in pair) for pair in sums)
    return Claim(said, abs(ours / theirs - 1) <= 0.01, f"{ours / theirs:.4f}")


def _stopping(runs: Mapping[Key, Ran], alphas: Sequence[str]) -> list[Claim]:
    rounds = [over_alphas(runs, OURS + end, alphas, "rounds") for end in ("", STOPPING)]
    shares = [over_alphas(runs, OURS + end, alphas) for end in ("", STOPPING)]
    least, most = FEWER
    said = f"early stopping cuts FedSPU's rounds by {100 * least:g} to {100 * most:g} %"
    if None in rounds or None in shares:
        return [Claim(said, None)]
    whole, short = (one or 0.0 for one in rounds)
    before, after = (one or 0.0 for one in shares)
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


def table(runs: Mapping[Key, Ran]) -> Table:
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
    runs = read(options.study)
    if options.json:
        cells = [{"method": m, "alpha": a, "seed": s, **asdict(one)} for (m, a, s), one in sorted(runs.items())]
        sys.stdout.buffer.write(msgspec.json.encode({"cells": cells, "claims": [asdict(one) for one in claims(runs)]}))
        return 0
    console = Console(width=130)
    console.print(table(runs))
    shown = Table("claim", "holds", "", box=None)
    for one in claims(runs):
        shown.add_row(one.said, verdict(one), one.figures)
    console.print(shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
