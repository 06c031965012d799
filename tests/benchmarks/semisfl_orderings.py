"""What the studies `deploy/studies/semisfl*.toml` say of the paper's orderings, as far as their cells have been run.

    python tests/benchmarks/semisfl_orderings.py runs/semisfl-har-study [--json]

Xu et al. print the accuracy of the teacher on test data, and what it took until an accuracy. Methods are compared over
the seeds that both ran with in a setting, by the last evaluation. A claim that does not hold is told as such: it
changes no exit code.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TypeAlias

import msgspec
from rich.console import Console
from rich.table import Table

from edge_server.plan.plan import Plan
from edge_server.replay.study.result import RESULT, Result
from edge_server.replay.study.run import StudyRecord
from edge_server.report.digest import Digest
from edge_server.report.targets import best_value, last_evaluated, round_reaching

OURS, FIXED, ABLATION = "semisfl", "semisfl_fixed", "fedswitch_sl"
LABELS, PLAIN = "supervised_only", "cross_entropy_only"
WHOLE_MODEL = ("semifl", "fedmatch", "fedswitch")
"""Baselines whose devices train the whole model."""

MIXED = ("100", "even", "1", "0.5", "client", "0.1", "0.05")
"""Settings from the least skewed to the most: Dirichlet's alpha, or another kind of partition."""

PAPER: Mapping[tuple[str, str], float] = {
    (LABELS, "100"): 75.1,
    (ABLATION, "100"): 87.5,
    (OURS, "100"): 88.6,
    ("semifl", "100"): 86.8,
    ("fedmatch", "100"): 86.1,
    ("fedswitch", "100"): 87.9,
    ("semifl", "1"): 84.9,
    ("fedmatch", "1"): 85.9,
    ("fedswitch", "1"): 86.2,
    (ABLATION, "1"): 86.4,
    (OURS, "1"): 87.9,
    ("semisfl-none", "1"): 86.6,
    ("semisfl-linear", "1"): 87.2,
    ("semifl", "0.1"): 78.9,
    ("fedmatch", "0.1"): 79.7,
    ("fedswitch", "0.1"): 79.4,
    (ABLATION, "0.1"): 79.2,
    (OURS, "0.1"): 83.8,
    ("semisfl-none", "0.1"): 82.8,
    ("semisfl-linear", "0.1"): 82.9,
}
"""The paper's accuracies in percent, of CIFAR-10 with 4,000 labels: its tables of final accuracy, skew and heads."""

Key: TypeAlias = tuple[str, str, str]
"""Method, setting, seed."""

Runs: TypeAlias = Mapping[Key, "Ran"]


@dataclass(frozen=True)
class Ran:
    """One run.

    Attributes:
        accuracy: Of the last evaluation.
        best: Of the best one.
        target_s, target_bytes: Virtual seconds and bytes of frames until the study's target; None where it was not
            reached, or there is none.
        bytes: Of the whole run.
        seconds: That it took on the machine that ran it.
    """

    accuracy: float
    best: float
    target_s: float | None
    target_bytes: float | None
    bytes: float
    seconds: float


def ran(run: Digest, target: float | None, seconds: float) -> Ran | None:
    """Return what a run came to; None where nothing was evaluated.

    Args:
        target: Accuracy that the study asks for.
        seconds: That it took on the machine that ran it.
    """
    final, best = last_evaluated(run), best_value(run)
    if final is None or final.accuracy is None or best is None:
        return None
    there = round_reaching(run, target) if target else None
    return Ran(
        accuracy=final.accuracy,
        best=best,
        target_s=there.until.seconds.value if there else None,
        target_bytes=there.until.bytes.value if there else None,
        bytes=run.rounds[-1].until.bytes.value or 0.0,
        seconds=seconds,
    )


def key_of(plan: Plan) -> Key:
    """Return of what method and setting a run is; a head or inertia that is not the usual one is in the method."""
    options, part = plan.algorithm.options, plan.partition
    head, inertia = options.get("head", "mlp"), options.get("inertia", 0.99)
    method = plan.algorithm.name
    method = FIXED if method == OURS and not options.get("adapt", True) else method
    method = PLAIN if method == LABELS and not options.get("contrastive", True) else method
    method += f"-{head}" if head != "mlp" else ""
    method += f"-inertia-{inertia}" if inertia != 0.99 else ""
    return method, f"{part.alpha:g}" if part.kind == "dirichlet" else part.kind, str(plan.seed)


def read(folder: Path) -> tuple[dict[Key, Ran], float | None]:
    """Return the runs of a study that have ended, and the accuracy that it asks for."""
    target = msgspec.json.decode((folder / "study.json").read_bytes(), type=StudyRecord).study.report.target
    found: dict[Key, Ran] = {}
    for path in sorted(folder.glob(f"*/{RESULT}")):
        result = msgspec.json.decode(path.read_bytes(), type=Result)
        if one := ran(result.digest, target, result.seconds):
            found[key_of(result.digest.plan)] = one
    return found, target


def settings_of(runs: Runs) -> list[str]:
    """Return the settings that were run, the least skewed first."""
    there = {setting for _, setting, _ in runs}
    return sorted(there, key=lambda one: (MIXED.index(one) if one in MIXED else len(MIXED), one))


def gaps(runs: Runs, better: str, worse: str, setting: str) -> list[float]:
    """Return how far one method is above another, seed by seed, over the seeds that both ran with in a setting."""
    seeds = sorted(seed for method, own, seed in runs if (method, own) == (better, setting))
    pairs = [(runs[better, setting, seed], runs.get((worse, setting, seed))) for seed in seeds]
    return [one.accuracy - other.accuracy for one, other in pairs if other]


@dataclass(frozen=True)
class Claim:
    """Something that is claimed, and what the runs say of it: None where they say nothing."""

    said: str
    holds: bool | None
    figures: str = ""


def claims(runs: Runs) -> list[Claim]:
    """Return what holds, setting by setting."""
    found = []
    for setting in settings_of(runs):
        pairs = [(OURS, ABLATION, "above"), (ABLATION, LABELS, "above")]
        pairs += [(ABLATION, PLAIN, "above"), (OURS, LABELS, "above")]
        pairs += [(OURS, FIXED, "at least"), (OURS, f"{OURS}-inertia-0.999", "at least")]
        pairs += [(OURS, f"{OURS}-linear", "at least"), (f"{OURS}-linear", f"{OURS}-none", "at least")]
        pairs += [(OURS, other, "above") for other in WHOLE_MODEL]
        found += [_ordering(runs, pair, setting) for pair in pairs]
    return [*found, _growth(runs)]


def _ordering(runs: Runs, pair: tuple[str, str, str], setting: str) -> Claim:
    better, worse, word = pair
    said, apart = f"{setting}: {better} {word} {worse}", gaps(runs, better, worse, setting)
    if not apart:
        return Claim(said, None)
    mean = fmean(apart)
    return Claim(
        said, mean > 0 if word == "above" else mean >= 0, f"{spread(apart, sign='+')} points, {len(apart)} seeds"
    )


def _growth(runs: Runs) -> Claim:
    there = [(setting, gaps(runs, OURS, ABLATION, setting)) for setting in settings_of(runs)]
    there = [(setting, apart) for setting, apart in there if apart]
    said = f"the gap of {OURS} to {ABLATION} grows with skew"
    if len(there) < 2:
        return Claim(said, None)
    (even, least), (skewed, most) = there[0], there[-1]
    figures = f"{even}: {spread(least, sign='+')}, {skewed}: {spread(most, sign='+')} points"
    return Claim(said, fmean(most) > fmean(least), figures)


def spread(values: Sequence[float], unit: float = 100.0, sign: str = "") -> str:
    """Return mean and standard deviation.

    Args:
        unit: What they are multiplied by.
        sign: `+` for a sign in any case.
    """
    apart = f" ± {unit * stdev(values):.2f}" if len(values) > 1 else ""
    return f"{unit * fmean(values):{sign}.2f}{apart}"


def table(runs: Runs, target: float | None) -> Table:
    """Return one row a method and setting, with the paper's figure where it prints one."""
    made = Table("method", "setting", "runs", "accuracy, %", "paper's CIFAR-10", "best", box=None)
    asked = f"{100 * target:g} %" if target else "-"
    for heading in (f"reached {asked}", "min until", "MB until", "MB in all", "s a run"):
        made.add_column(heading, justify="right")
    for setting in settings_of(runs):
        for method in dict.fromkeys(method for method, at, _ in sorted(runs) if at == setting):
            own = [one for (name, at, _), one in runs.items() if (name, at) == (method, setting)]
            papers = PAPER.get((method.removesuffix("_fixed"), "100" if setting == "even" else setting))
            made.add_row(
                *(method, setting, str(len(own)), spread([one.accuracy for one in own])),
                *("" if papers is None or method == FIXED else f"{papers}", spread([one.best for one in own])),
                *_until(own),
                *(f"{fmean(one.bytes for one in own) / 1e6:.1f}", f"{fmean(one.seconds for one in own):.0f}"),
            )
    return made


def _until(own: Sequence[Ran]) -> tuple[str, str, str]:
    """Return how many runs reached the target, and the mean minutes and megabytes of those."""
    minutes = [one.target_s / 60 for one in own if one.target_s is not None]
    sizes = [one.target_bytes / 1e6 for one in own if one.target_bytes is not None]
    count = f"{len(minutes)}/{len(own)}"
    return count, f"{fmean(minutes):.1f}" if minutes else "", f"{fmean(sizes):.1f}" if sizes else ""


def verdict(one: Claim) -> str:
    """Return a claim's verdict as a word."""
    return "not run" if one.holds is None else "yes" if one.holds else "NO"


def main() -> int:
    """Print a row a method and setting, and a row a claim."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", type=Path)
    parser.add_argument("--json", action="store_true", help="the runs, and the claims")
    options = parser.parse_args()
    runs, target = read(options.study)
    if options.json:
        cells = [{"method": m, "setting": at, "seed": s, **asdict(one)} for (m, at, s), one in sorted(runs.items())]
        said = [asdict(one) for one in claims(runs)]
        sys.stdout.buffer.write(msgspec.json.encode({"cells": cells, "claims": said}))
        return 0
    shown = Table("claim", "holds", "", box=None)
    for one in claims(runs):
        if one.holds is not None:
            shown.add_row(one.said, verdict(one), one.figures)
    console = Console(width=150)
    console.print(table(runs, target))
    console.print(shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
