"""Objective of a run without its loss, for boards without torch."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from shared import registry
from shared.errors import ConfigError
from shared.objectives.metric_table import METRICS
from shared.objectives.metrics import Array, Metric, Sums
from shared.protocol.messages import Spec
from shared.protocol.objective import CLASSIFICATION_SPEC, LOSS, Kind, ObjectiveSpec

Tensors = TypeVar("Tensors", bound=Any)
"""Arrays of numpy or tensors of torch."""

DEFAULT_LOSSES: Mapping[Kind, str] = {
    "classification": "cross_entropy",
    "multilabel": "binary_cross_entropy",
    "regression": "mse",
    "forecast": "mse",
    "segmentation": "cross_entropy",
    "anomaly": "mse",
}
DEFAULT_METRICS: Mapping[Kind, tuple[str, ...]] = {
    "classification": ("accuracy",),
    "multilabel": ("macro_f1", "accuracy"),
    "regression": ("rmse", "mae", "r2"),
    "forecast": ("rmse", "mae"),
    "segmentation": ("iou", "accuracy"),
    "anomaly": ("auroc",),
}
LOSS_SUMS = 2
"""Sums of the loss: of the losses of examples, and the number of these."""
LEAST_ERROR = 1e-12
"""Added to a reconstruction error before its logarithm, by which `auroc` orders examples."""


@dataclass(frozen=True)
class Objective:
    """Objective by which a run is evaluated.

    Attributes:
        spec: The spec from which it is built.
        metrics: Metrics by name, in the order of the report.
        metric: Name of the metric by which models are compared; may be `LOSS`.
        direction: Whether larger or smaller values of it are better.
    """

    spec: ObjectiveSpec
    metrics: Mapping[str, Metric]
    metric: str
    direction: Literal["max", "min"]

    @property
    def kind(self) -> Kind:
        """Kind of task."""
        return self.spec.kind

    @property
    def loss_name(self) -> str:
        """Name of the loss, that of the kind if the plan names none."""
        return self.spec.loss or DEFAULT_LOSSES[self.kind]

    @property
    def reconstructs(self) -> bool:
        """True if the target is the input: an anomaly is an example that the network cannot reproduce."""
        return self.kind == "anomaly"

    def operands(self, outputs: Tensors, targets: Tensors, inputs: Tensors) -> tuple[Tensors, Tensors]:
        """Return the operands of the loss: outputs and targets, or reconstructions and inputs of normal examples."""
        if not self.reconstructs:
            return outputs, targets
        normal = targets <= 0
        return outputs[normal], inputs[normal]

    def sums(self, outputs: Array, targets: Array, inputs: Array) -> dict[str, Sums]:
        """Return each metric's sums over a batch; they add over batches and devices.

        Args:
            outputs: Of shape (N, ...).
            targets: Of shape (N, ...); with `reconstructs`, 1 for an anomaly and 0 for a normal example.
            inputs: Of shape (N, ...).

        Raises:
            ConfigError: A metric does not accept these shapes.
        """
        sums = dict[str, Sums]()
        for name, metric in self.metrics.items():
            try:
                sums[name] = np.asarray(metric.sums(*self._metric_operands(name, outputs, targets, inputs)), np.float64)
            except registry.FAULTS as error:
                problem = f"{type(error).__name__}: {error}".partition("\n")[0]
                raise ConfigError(
                    f"task.metrics: {name!r} does not accept outputs of shape {outputs.shape} and targets of shape "
                    f"{targets.shape} ({problem}); correct it, or leave it out"
                ) from error
        return sums

    def _metric_operands(self, name: str, outputs: Array, targets: Array, inputs: Array) -> tuple[Array, Array]:
        """Return the operands of a metric; AUROC of a reconstruction: errors and labels of all examples."""
        if not self.reconstructs or name != "auroc":
            return self.operands(outputs, targets, inputs)
        errors = ((outputs.astype(np.float64) - inputs) ** 2).reshape(len(inputs), -1).mean(1)
        return np.log(errors + LEAST_ERROR), targets

    def values(self, sums: Mapping[str, Sums]) -> dict[str, float]:
        """Return the metrics' values; without those that the examples do not define, or that cannot be computed."""
        values = {name: self._value(name, vector) for name, vector in sums.items()}
        return {name: value for name, value in values.items() if math.isfinite(value)}

    def _value(self, name: str, vector: Sums) -> float:
        """Return a metric's value; NaN where its sums give none, as sums of another length."""
        if name == LOSS:
            return float(vector[0] / vector[1]) if len(vector) == LOSS_SUMS and vector[1] > 0 else math.nan
        if name not in self.metrics:
            return math.nan
        try:
            return float(self.metrics[name].value(vector))
        except registry.FAULTS:
            return math.nan

    def require_values(self, sums: Mapping[str, Sequence[float]]) -> None:
        """Refuse a metric of the user whose value cannot be computed from its own sums.

        Raises:
            ConfigError: The message names the metric and the error.
        """
        for name, metric in self.metrics.items():
            try:
                float(metric.value(np.asarray(sums[name], np.float64)))
            except registry.FAULTS as error:
                problem = f"{type(error).__name__}: {error}".partition("\n")[0]
                raise ConfigError(f"task.metrics: {name!r} gives no value ({problem}); correct it") from error

    def is_better(self, value: float, than: float) -> bool:
        """Compare two values of the metric by which models are compared."""
        return value > than if self.direction == "max" else value < than


def build_objective(spec: ObjectiveSpec = CLASSIFICATION_SPEC) -> Objective:
    """Build an objective without its loss.

    Raises:
        ConfigError: A metric is unknown or does not suit the kind; the message names the table `[task]`.
    """
    names = spec.metrics or DEFAULT_METRICS.get(spec.kind, ())
    metrics = {name: _build_metric(name, spec) for name in names}
    metric = spec.target.metric or next(iter(metrics))
    if metric != LOSS and metric not in metrics:
        raise ConfigError(f"task.target.metric: {metric!r} is not among the metrics {', '.join(metrics)} or {LOSS!r}")
    direction = spec.target.direction or ("min" if metric == LOSS else metrics[metric].direction)
    return Objective(spec, metrics, metric, direction)


def _build_metric(name: str, spec: ObjectiveSpec) -> Metric:
    if name not in METRICS:
        return _custom_metric(name)
    options = {"q": spec.loss_options["q"]} if name == "quantile_loss" and "q" in spec.loss_options else {}
    metric: Metric = registry.build(METRICS, Spec(name=name, options=options), "metric")
    if metric.kinds and spec.kind not in metric.kinds:
        suited = sorted(name for name, build in METRICS.items() if spec.kind in build().kinds)
        raise ConfigError(f"task.metrics: {name!r} does not suit kind {spec.kind!r}; choose {', '.join(suited)}")
    return metric


def _custom_metric(name: str) -> Metric:
    function = registry.find(METRICS, name, "metric")
    if inspect.signature(function).parameters:
        return metric_of_means(function)
    metric: object = function()
    if not isinstance(metric, Metric):
        raise ConfigError(f"metric {name!r} returned a {type(metric).__name__}, not a Metric; correct its builder")
    return metric


def metric_of_means(function: Callable[[Array, Array], Any]) -> Metric:
    """Build a metric from a function that returns one value per example; its value is their mean."""

    def sums(outputs: Array, targets: Array) -> Sums:
        values = np.asarray(function(outputs, targets), np.float64)
        if values.shape != (len(targets),):
            raise ValueError(f"returned shape {values.shape}; return one value for each of {len(targets)} examples")
        return np.array([values.sum(), len(values)])

    return Metric(sums, lambda vector: float(vector[0] / vector[1]) if vector[1] else math.nan)
