"""Sums of loss and metrics over batches and devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shared.objectives.base import Objective
from shared.objectives.metrics import Array, Sums
from shared.protocol.objective import LOSS

PREFIX = "eval_"
"""Prefix of metrics of held-out examples among those of an update."""
MOST_SUMS = 8192
"""Largest number of sums of one metric in an update."""


@dataclass(frozen=True)
class HeldOutScore:
    """Metrics of an update, and the sums behind them.

    Attributes:
        metrics: `eval_loss`, `eval_examples`, `eval_accuracy` of a classification, and the objective's other metrics.
        sums: Sums of the objective's metrics, which add over devices; empty for the default objective.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    sums: Mapping[str, list[float]] = field(default_factory=dict)


def build_score(
    *,
    examples: int,
    loss: float | None,
    accuracy: float | None,
    metrics: Mapping[str, float],
    sums: Mapping[str, list[float]],
) -> HeldOutScore:
    """Return the score under the names of an update's metrics; figures that are None are left out."""
    figures = {"accuracy": accuracy, "loss": loss, "examples": float(examples)}
    own_figures = {f"{PREFIX}{name}": value for name, value in figures.items() if value is not None}
    return HeldOutScore({f"{PREFIX}{name}": value for name, value in metrics.items()} | own_figures, dict(sums))


@dataclass
class MetricSums:
    """Loss and metrics so far.

    Attributes:
        loss_sum: Sum of the losses of `counted` examples.
        sums: Sums of each metric, by name.
    """

    objective: Objective
    loss_sum: float = 0.0
    counted: int = 0
    sums: dict[str, Sums] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """Mean loss per example; NaN without an example."""
        return self.loss_sum / self.counted if self.counted else float("nan")

    def add_loss(self, loss_sum: float, count: int) -> None:
        """Add the losses of `count` examples."""
        self.loss_sum += loss_sum
        self.counted += count

    def add(self, outputs: Array, targets: Array, inputs: Array) -> None:
        """Add a batch to the metrics; shapes as in `Objective.sums`."""
        self.merge(self.objective.sums(outputs, targets, inputs))

    def merge(self, sums: Mapping[str, Sums]) -> None:
        """Add sums of other examples."""
        for name, vector in sums.items():
            self.sums[name] = self.sums[name] + vector if name in self.sums else vector

    def values(self) -> dict[str, float]:
        """Return the metrics' values."""
        return self.objective.values(self.sums) if self.sums else {}

    def lists(self) -> dict[str, list[float]]:
        """Return the sums as an update carries them, with those of the loss; empty without metrics."""
        lists = {name: vector.tolist() for name, vector in self.sums.items()}
        return lists | {LOSS: [self.loss_sum, float(self.counted)]} if lists and self.counted else lists


def merge_sums(objective: Objective, parts: Iterable[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Return the metrics over the examples of several devices together, the loss among them.

    Sums of another length than those of most devices are of other outputs, and do not count.

    Args:
        parts: Each device's sums by metric.
    """
    vectors: dict[str, list[Sums]] = {}
    for part in parts:
        for name, sums in part.items():
            vectors.setdefault(name, []).append(np.asarray(sums, np.float64))
    total = MetricSums(objective)
    with np.errstate(over="ignore", invalid="ignore"):  # such values are left out below
        for name, of_devices in vectors.items():
            [(length, _)] = Counter(map(len, of_devices)).most_common(1)
            for vector in of_devices:
                if len(vector) == length:
                    total.merge({name: vector})
        return total.values()
