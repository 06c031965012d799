"""What the study `deploy/studies/hcef.toml` says of the paper's Table II, as far as its cells have been run.

    python tests/benchmarks/hcef_orderings.py runs/hcef-study [--targets 0.75,0.78,0.8]

Zhang, Gao, Guo, Gong compare time and energy until an accuracy, the mean of the edge models' after a global round. Of
each target, what CEF took until it over what a method took, the mean over the seeds that both ran with; above 1 is
less. A claim that does not hold is told as such: it changes no exit code.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TypeAlias

import msgspec
from rich.console import Console
from rich.table import Table

from edge_server.replay.study.result import RESULT, Result
from edge_server.report.digest import Digest
from edge_server.report.targets import last_evaluated, round_reaching

TARGETS = (0.75, 0.78, 0.8)
PAPER = {"hcef": (1.95, 1.84), "cef_f": (1.43, 1.49), "mll_sgd": (1.30, 1.39), "cef_c": (1.02, 1.05), "cef": (1.0, 1.0)}
"""CEF's time and energy over a method's until 70 % of CIFAR-10, by Table II; the order is the paper's."""
LEAST_TIME, LEAST_ENERGY, POINT = 1.5, 1.4, 0.01

Runs: TypeAlias = Mapping[str, Mapping[str, Digest]]
"""By variant and seed."""


def read(folder: Path) -> dict[str, dict[str, Digest]]:
    """Return the runs of a study that have ended."""
    found: dict[str, dict[str, Digest]] = {}
    for path in sorted(folder.glob(f"*/{RESULT}")):
        variant, _, seed = path.parent.name.partition("_seed-")
        found.setdefault(variant, {})[seed.partition("-")[0]] = msgspec.json.decode(
            path.read_bytes(), type=Result
        ).digest
    return found


def taken(run: Digest, target: float) -> tuple[float, float, int] | None:
    """Return seconds, joules and rounds until an accuracy; None where it was never reached or they are not known."""
    found = round_reaching(run, target)
    if found is None or found.until.seconds.value is None or found.until.joules.value is None:
        return None
    return found.until.seconds.value, found.until.joules.value, found.round


def times_less(runs: Runs, variant: str, target: float, plain: str = "cef") -> tuple[float, float] | None:
    """Return how many times less time and energy a variant took than another; None where they share no seed."""
    pairs = [
        (taken(run, target), taken(runs[plain][seed], target))
        for seed, run in runs.get(variant, {}).items()
        if seed in runs.get(plain, {})
    ]
    both = [(own, other) for own, other in pairs if own and other]
    if not both or len(both) < len(pairs):
        return None
    return fmean(other[0] / own[0] for own, other in both), fmean(other[1] / own[1] for own, other in both)


def last(runs: Mapping[str, Digest]) -> list[float]:
    """Return the accuracy of the last edge models, by run."""
    ends = [last_evaluated(run) for run in runs.values()]
    return [one.accuracy for one in ends if one and one.accuracy is not None]


def claims(runs: Runs, target: float) -> list[tuple[str, str]]:
    """Return what is claimed, and whether it holds."""
    found = {name: times_less(runs, name, target) for name in PAPER}
    names = [name for name in PAPER if found[name]]
    told = [(f"order by {unit}: {' < '.join(names)}", _ordered(found, names, at)) for at, unit in enumerate(("s", "J"))]
    for at, (least, unit) in enumerate(((LEAST_TIME, "less time"), (LEAST_ENERGY, "less energy"))):
        ours = found["hcef"]
        told.append((f"hcef: {least} times {unit} than cef", _verdict(ours and ours[at] >= least, ours and ours[at])))
    if {"hcef", "cef"} <= runs.keys():
        below = fmean(last(runs["cef"])) - fmean(last(runs["hcef"]))
        told.append(("hcef ends within a point of cef", _verdict(below <= POINT, 100 * below)))
    skewed, ring = times_less(runs, "hcef-skewed", target, "cef-skewed"), found["hcef"]
    wider = skewed and ring and skewed[0] > ring[0] and skewed[1] > ring[1]
    told.append(("with more skew hcef gains more", _verdict(wider, skewed and skewed[0])))
    full = times_less(runs, "hcef-full", target, "hcef")
    told.append(("a full graph takes hcef no more time", _verdict(full and full[0] >= 1, full and full[0])))
    return told


def _ordered(found: Mapping[str, tuple[float, float] | None], names: Sequence[str], at: int) -> str:
    values = [one[at] for name in names if (one := found[name])]
    told = " ".join(f"{value:.2f}" for value in values)
    return f"{'yes' if values == sorted(values, reverse=True) else 'NO'}: {told}"


def _verdict(holds: object, value: float | None) -> str:
    return "not known" if value is None else f"{'yes' if holds else 'NO'}: {value:.2f}"


def table(runs: Runs, targets: Sequence[float]) -> Table:
    """Return a row a variant."""
    found = Table("variant", "runs", "last %", *(f"{100 * one:g} %" for one in targets), "paper", box=None)
    for name, own in sorted(runs.items(), key=lambda pair: [*PAPER, pair[0]].index(pair[0])):
        ends = last(own)
        apart = f" ± {100 * stdev(ends):.1f}" if len(ends) > 1 else ""
        until = [_until(own, one) + _less(times_less(runs, name, one)) for one in targets]
        paper = PAPER.get(name)
        found.add_row(
            name, str(len(own)), f"{100 * fmean(ends):.1f}{apart}", *until, f"{paper[0]}, {paper[1]}" if paper else ""
        )
    return found


def _until(runs: Mapping[str, Digest], target: float) -> str:
    known = [one for run in runs.values() if (one := taken(run, target))]
    if not known:
        return "never"
    some = "" if len(known) == len(runs) else f"{len(known)} of {len(runs)}: "
    return f"{some}{fmean(one[0] for one in known) / 1e3:.1f} ks, {fmean(one[1] for one in known) / 1e3:.1f} kJ"


def _less(found: tuple[float, float] | None) -> str:
    return f"\n{found[0]:.2f}, {found[1]:.2f}" if found else ""


def main() -> int:
    """Print a row a variant, with how many times less than CEF it took below, and a row a claim for each target."""
    parser = argparse.ArgumentParser(description="What HCEF's study says of its paper.")
    parser.add_argument("study", type=Path, help="its folder")
    parser.add_argument("--targets", default=",".join(map(str, TARGETS)), help="accuracies")
    told = parser.parse_args()
    runs, targets = read(told.study), [float(one) for one in told.targets.split(",")]
    console = Console(width=150)
    console.print(table(runs, targets))
    for target in targets:
        rows = Table(f"claim, until {100 * target:g} %", "holds", box=None)
        for row in claims(runs, target):
            rows.add_row(*row)
        console.print(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
