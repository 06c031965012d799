"""Objective of a run in plans and tasks: kind, loss, metrics, target."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import msgspec

Kind: TypeAlias = Literal["classification", "multilabel", "regression", "forecast", "segmentation", "anomaly", "custom"]
CLASS_KINDS = frozenset({"classification", "segmentation"})
"""Kinds whose targets are class numbers."""
NUMBER_KINDS = frozenset({"multilabel", "regression", "forecast"})
"""Kinds whose targets are numbers."""
MOST_METRICS = 16
LOSS = "loss"
"""Name of the loss among the metrics; smaller is better."""


class Target(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Metric by which models are compared, and the value at which a run ends.

    Attributes:
        metric: One of the metrics, or `loss`.
        direction: `max` where larger is better, `min` where smaller is; absent: as the metric defines it, which a
            metric of your own (`module:attribute`) may not.
        value: The run ends after the round in which the server's test data reach this value; absent: after the last
            round.
    """

    metric: str = ""
    direction: Literal["max", "min"] | msgspec.UnsetType = msgspec.UNSET
    value: float | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        """Reject a value that no metric reaches."""
        if self.value is not msgspec.UNSET and not math.isfinite(self.value):
            raise ValueError(f"value is {self.value}; give a finite number, or leave it out")


class ObjectiveSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Objective that a run trains for.

    Attributes:
        kind: Kind of task, which decides the type of the targets, and the default loss and metrics.
        loss: A built-in loss, or `module:attribute`; empty: that of the kind.
        loss_options: Options of the loss, such as `q` of `quantile`.
        metrics: Built-in metrics, or `module:attribute`; empty: those of the kind.
        target: The metric that decides which model is best; absent: the first one.
        class_weights: Weight of each class in the loss, in class order; empty: 1 each.
        label_smoothing: Share of the probability that the loss spreads over all classes, in [0, 1).
    """

    kind: Kind = "classification"
    loss: str = ""
    loss_options: dict[str, bool | int | float | str] = {}
    metrics: tuple[str, ...] = ()
    target: Target = Target()
    class_weights: tuple[float, ...] = ()
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        """Reject values out of range, and class options without classes."""
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing is {self.label_smoothing}; give 0 or more, and below 1")
        if any(not 0 < weight < math.inf for weight in self.class_weights):
            raise ValueError("class_weights must be above 0 and finite")
        if (self.class_weights or self.label_smoothing) and (self.kind not in CLASS_KINDS or self.loss):
            raise ValueError(
                f"class_weights and label_smoothing belong to the default loss of {' and '.join(sorted(CLASS_KINDS))}; "
                "leave them out"
            )
        if len(self.metrics) > MOST_METRICS or len(set(self.metrics)) < len(self.metrics):
            raise ValueError(f"metrics: give at most {MOST_METRICS}, each once")
        if self.kind == "custom" and not (self.loss and self.metrics):
            raise ValueError('kind = "custom" has no defaults: set loss and metrics')


CLASSIFICATION_SPEC = ObjectiveSpec()
"""Objective of runs without a table `[task]`, among them all of versions that had none."""
