"""Sums of loss and metrics over the batches of an evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shared.errors import WireError
from shared.objectives.base import Objective
from shared.objectives.metrics import Array, Sums

MOST_SUMS = 8192
"""Largest number of sums of one metric in an update."""


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
        return self.objective.values(self.sums)

    def lists(self) -> dict[str, list[float]]:
        """Return the sums as an update carries them."""
        return {name: vector.tolist() for name, vector in self.sums.items()}


def merge_sums(objective: Objective, parts: Iterable[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Return the metrics over the examples of several devices together.

    Args:
        parts: Each device's sums by metric.

    Raises:
        WireError: Two devices have sums of different lengths for one metric.
    """
    total = MetricSums(objective)
    for part in parts:
        vectors = {name: np.asarray(vector, np.float64) for name, vector in part.items()}
        for name, vector in vectors.items():
            if name in total.sums and total.sums[name].shape != vector.shape:
                raise WireError(
                    f"metric {name!r}: {len(vector)} sums, and {len(total.sums[name])} of other devices",
                    reason="metrics",
                )
        total.merge(vectors)
    return total.values()
