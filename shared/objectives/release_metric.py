"""Metric of a release, computed without torch or custom code."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from shared.objectives.base import Objective, build_objective
from shared.objectives.metric_sums import MetricSums
from shared.objectives.metric_table import METRICS
from shared.objectives.metrics import Array
from shared.protocol.inference.release import ReleaseTask
from shared.protocol.objective import ObjectiveSpec, Target

RELATIVE = frozenset({"mae", "quantile_loss", "rmse"})
"""Metrics in the unit of the targets: a drop is a share of the reference's value, and of others a difference."""
BATCH = 64


def find_objective(task: ReleaseTask | msgspec.UnsetType) -> Objective | None:
    """Return the objective of a release's first built-in metric; None if all its metrics are the user's own.

    Raises:
        ConfigError: The metric does not suit the kind of task.
    """
    if task is msgspec.UNSET:
        return build_objective()
    names = [name for name in task.metrics if name in METRICS]
    if not names:
        return None
    direction = task.direction if names[0] == task.metrics[0] else msgspec.UNSET
    target = Target(metric=names[0], direction=direction)
    loss = "mse" if task.kind == "custom" else ""
    return build_objective(
        ObjectiveSpec(kind=task.kind, loss=loss, loss_options=task.options, metrics=(names[0],), target=target)
    )


def measure(objective: Objective, run: Callable[[Array], Array], inputs: Array, labels: Array) -> float | None:
    """Return the metric of a network on examples; None if they do not define it.

    Args:
        run: Returns the outputs for a batch of inputs.
        inputs: Of shape (N, ...).
        labels: Targets of shape (N, ...).

    Raises:
        ConfigError: The metric does not accept the outputs.
    """
    total = MetricSums(objective)
    for begin in range(0, len(labels), BATCH):
        batch = inputs[begin : begin + BATCH]
        total.add(run(batch), labels[begin : begin + BATCH], batch)
    return total.values().get(objective.metric)


def drop_of(objective: Objective, value: float, reference: float) -> float:
    """Return by how much a value is worse than the reference's; negative if it is better."""
    worse = reference - value if objective.direction == "max" else value - reference
    if objective.metric not in RELATIVE or not worse:
        return worse
    return worse / abs(reference) if reference else math.copysign(math.inf, worse)
