"""Metric of a release: built-in, or the user's where this process allows its code."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from socket import gethostname

import msgspec

from shared.errors import ConfigError
from shared.objectives.base import Objective, build_objective
from shared.objectives.metric_sums import MetricSums
from shared.objectives.metric_table import METRICS
from shared.objectives.metrics import Array
from shared.plugins import require_same
from shared.protocol.inference.release import ReleaseTask
from shared.protocol.messages import PluginVersion
from shared.protocol.objective import ObjectiveSpec, Target

log = logging.getLogger(__name__)

RELATIVE = frozenset({"mae", "quantile_loss", "rmse"})
"""Metrics in the unit of the targets: a drop is a share of the reference's value, and of others a difference."""
BATCH = 64


def find_objective(
    task: ReleaseTask | msgspec.UnsetType, plugins: Iterable[PluginVersion] | msgspec.UnsetType = ()
) -> Objective | None:
    """Return the objective of a release's first metric that this process can compute; None if there is none.

    A metric of the user counts where its code is installed, allowed, and the same as in training.

    Args:
        plugins: Code of the user that the release was trained with.

    Raises:
        ConfigError: A built-in metric does not suit the kind of task.
    """
    if task is msgspec.UNSET:
        return build_objective()
    expected = {plugin.name: plugin for plugin in plugins or () if plugin.kind == METRICS.kind}
    for name in task.metrics:
        try:
            if name in expected:
                require_same([expected[name]], [METRICS], gethostname())
            return _build_objective(task, name)
        except ConfigError as error:
            if name in METRICS:
                raise
            log.warning("metric %s is not measured here: %s", name, error)
    return None


def _build_objective(task: ReleaseTask, name: str) -> Objective:
    direction = task.direction if name == task.metrics[0] else msgspec.UNSET
    loss = "mse" if task.kind == "custom" else ""
    target = Target(metric=name, direction=direction)
    return build_objective(
        ObjectiveSpec(kind=task.kind, loss=loss, loss_options=task.options, metrics=(name,), target=target)
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
