"""What the study `deploy/studies/fedsl.toml` says of the paper's orderings.

    python tests/benchmarks/fedsl_orderings.py runs/fedsl-study

Zhang, Ni, Wang print curves alone; what they claim of them is asked here of the mean over seeds, with its spread.
A claim that does not hold is told as such: it changes no exit code.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

import msgspec
from rich.console import Console
from rich.table import Table

from edge_server.replay.study.result import RESULT, Result
from edge_server.report.digest import Digest

POINT = 0.01
"""Of accuracy."""


@dataclass(frozen=True)
class Curve:
    """One run.

    Attributes:
        accuracies: On test data, every time that it was evaluated.
        step_ms: Milliseconds of virtual time by step, rounds' model exchange included.
        exchanged: Bytes of features and gradients.
        model: Bytes of parameters, both ways.
    """

    accuracies: tuple[float, ...]
    step_ms: float
    exchanged: float
    model: float

    @property
    def last(self) -> float:
        """Accuracy of the last model."""
        return self.accuracies[-1]

    @property
    def mean(self) -> float:
        """Mean over all evaluations: of two runs that end alike, the one that was there sooner has more."""
        return fmean(self.accuracies)

    @property
    def drop(self) -> float:
        """The largest fall from one evaluation to the next, which says how it fluctuates."""
        pairs = zip(self.accuracies, self.accuracies[1:], strict=False)
        return max((before - after for before, after in pairs), default=0.0)


def curve(run: Digest) -> Curve:
    """Return what a run came to."""
    options, until = run.plan.algorithm.options, run.rounds[-1].until
    period = options["period"]
    assert isinstance(period, int)
    sums = {name: getattr(until, name).value or 0.0 for name in until.__struct_fields__}
    return Curve(
        accuracies=tuple(one.accuracy for one in run.rounds if one.accuracy is not None),
        step_ms=1000 * sums["seconds"] / (period * len(run.rounds)),
        exchanged=sums["features_bytes"] + sums["gradient_bytes"],
        model=sums["bytes_up"] + sums["bytes_down"],
    )


def read(folder: Path) -> dict[str, list[Curve]]:
    """Return the runs of a study that have ended, by variant."""
    found: dict[str, list[Curve]] = {}
    for path in sorted(folder.glob(f"*/{RESULT}")):
        result = msgspec.json.decode(path.read_bytes(), type=Result)
        found.setdefault(path.parent.name.partition("_seed-")[0], []).append(curve(result.digest))
    return found


def at_least(found: dict[str, list[Curve]], better: str, worse: str, figure: str, slack: float = 0.0) -> str:
    """Return whether one variant's mean figure is at least another's less `slack`, and both figures."""
    if better not in found or worse not in found:
        return "not run"
    one, other = ([getattr(run, figure) for run in found[name]] for name in (better, worse))
    verdict = "yes" if fmean(one) >= fmean(other) - slack else "NO"
    return f"{verdict}: {spread(one)} against {spread(other)}"


def spread(values: Sequence[float]) -> str:
    """Return mean and standard deviation in percent or, of what is no share, as it is."""
    unit = 100.0 if max(values) <= 1 else 1.0
    apart = f" ± {unit * stdev(values):.1f}" if len(values) > 1 else ""
    return f"{unit * fmean(values):.1f}{apart}"


CLAIMS: tuple[tuple[str, str, str, str, float], ...] = (
    ("rho 0.35 at least as good as none, less a point", "sparsity-35", "traditional", "last", POINT),
    ("rho 0.7 fluctuates more than 0.35", "sparsity-70", "sparsity-35", "drop", 0.0),
    ("q 8 within half a point of floats", "bits-8", "traditional", "last", POINT / 2),
    ("q 4 below q 8", "bits-8", "bits-4", "last", 0.0),
    ("I 1 at least 5", "period-1", "period-5", "last", 0.0),
    ("I 5 at least 10", "period-5", "period-10", "last", 0.0),
    ("shallow faster than deep at p 0.3", "shallow-drop-30", "deep-drop-30", "mean", 0.0),
    ("middle faster than deep at p 0.3", "period-5", "deep-drop-30", "mean", 0.0),
    ("shallow: p 0.7 slower than 0.3", "shallow-drop-30", "shallow-drop-70", "mean", 0.0),
    ("shallow: p 0.7 does not collapse, 5 points at most", "shallow-drop-70", "shallow-drop-30", "last", 5 * POINT),
    ("deep: p 0.7 costs more there, 5 points at least", "deep-drop-0", "deep-drop-70", "last", -5 * POINT),
    ("latency falls from p 0 to 0.3", "shallow-drop-0", "shallow-drop-30", "step_ms", 0.0),
    ("latency falls from p 0.3 to 0.7", "shallow-drop-30", "shallow-drop-70", "step_ms", 0.0),
)
"""What is claimed, the variant of which a figure is to be higher, the other, the figure, and how much may lack."""


def main() -> int:
    """Print a row a variant and a row a claim."""
    found = read(Path(sys.argv[1]))
    table = Table("variant", "runs", "last", "mean", "largest drop", "ms a step", "MB cut", "MB model", box=None)
    for name, runs in found.items():
        shares = [spread([getattr(run, figure) for run in runs]) for figure in ("last", "mean", "drop")]
        sizes = [f"{fmean(getattr(run, figure) for run in runs) / 1e6:.1f}" for figure in ("exchanged", "model")]
        table.add_row(name, str(len(runs)), *shares, f"{fmean(run.step_ms for run in runs):.1f}", *sizes)
    claims = Table("claim", "holds", box=None)
    for said, better, worse, figure, slack in CLAIMS:
        claims.add_row(said, at_least(found, better, worse, figure, slack))
    console = Console(width=110)
    console.print(table)
    console.print(claims)
    return 0


if __name__ == "__main__":
    sys.exit(main())
