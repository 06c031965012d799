"""Objective of a run with its loss, which training minimises."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.nn import functional

from shared import registry
from shared.errors import ConfigError
from shared.objectives.base import DEFAULT_LOSSES, Objective, build_objective
from shared.objectives.loss_table import LOSSES
from shared.objectives.losses import LossFunction, cross_entropy
from shared.protocol.messages import Spec
from shared.protocol.objective import CLASS_KINDS, CLASSIFICATION_SPEC, NUMBER_KINDS, ObjectiveSpec


@dataclass(frozen=True)
class TrainingObjective(Objective):
    """Objective by which a run trains."""

    @cached_property
    def loss_function(self) -> LossFunction:
        """Losses by example, or their mean where a loss of the user returns that; built when it is first needed.

        Raises:
            ConfigError: The loss is unknown.
        """
        return _build_loss(self.spec)

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each example, shape (N,).

        Raises:
            ConfigError: The loss is one of the user and returns only a mean, or does not accept these shapes.
        """
        losses = self._call(outputs, targets)
        if losses.ndim != 1:
            raise ConfigError(
                f"task.loss: {self.spec.loss!r} returns a value of shape {tuple(losses.shape)}, and a loss per example "
                "is needed here; return one value for each example"
            )
        return losses

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss over the examples, a scalar."""
        if self.spec == CLASSIFICATION_SPEC:  # one fused operation, and the bits of earlier versions
            return functional.cross_entropy(outputs, targets)
        losses = self._call(outputs, targets)
        return losses.mean() if losses.ndim else losses

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the losses of the examples, a scalar."""
        if self.spec == CLASSIFICATION_SPEC:
            return functional.cross_entropy(outputs, targets, reduction="sum")
        losses = self._call(outputs, targets)
        return losses.sum() if losses.ndim else losses * len(targets)

    def soft_targets(self, outputs: Tensor) -> Tensor:
        """Return a network's outputs as targets for another network, for distillation."""
        if self.kind in CLASS_KINDS:
            return outputs.softmax(1)
        return outputs.sigmoid() if self.kind == "multilabel" else outputs

    def part_losses(self, outputs: Tensor, targets: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Return the mean loss of each part of a batch, consecutive parts of these sizes."""
        if not self.spec.loss or self.spec.loss in LOSSES:
            return [part.mean() for part in self.each(outputs, targets).split(list(sizes))]
        parts = zip(outputs.split(list(sizes)), targets.split(list(sizes)), strict=True)
        return [self.loss(*part) for part in parts]

    def _call(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.kind in NUMBER_KINDS and outputs.numel() == targets.numel():
            outputs = outputs.reshape(targets.shape)  # a loss of the user would broadcast (N,) and (N, 1) to (N, N)
        try:
            return self.loss_function(outputs, targets)
        except registry.FAULTS as error:
            problem = str(error).partition("\n")[0]
            raise ConfigError(
                f"task.loss: {self.loss_name!r} does not accept outputs of shape "
                f"{tuple(outputs.shape)} and targets of shape {tuple(targets.shape)} ({problem}); correct the model's "
                "outputs, the data's targets or task.loss"
            ) from error


def build_training_objective(spec: ObjectiveSpec = CLASSIFICATION_SPEC) -> TrainingObjective:
    """Build an objective; its loss is built at its first use.

    Raises:
        ConfigError: A metric is unknown or does not suit the kind; the message names the table `[task]`.
    """
    objective = build_objective(spec)
    return TrainingObjective(spec, objective.metrics, objective.metric, objective.direction)


def _build_loss(spec: ObjectiveSpec) -> LossFunction:
    if spec.class_weights or spec.label_smoothing:
        return cross_entropy(spec.class_weights, spec.label_smoothing)
    name = spec.loss or DEFAULT_LOSSES[spec.kind]
    if name in LOSSES:
        return registry.build(LOSSES, Spec(name=name, options=spec.loss_options), "loss")
    custom: Any = registry.find(LOSSES, name, "loss")
    if inspect.isclass(custom) or spec.loss_options:  # a class such as an nn.Module, or a builder with options
        custom = custom(**spec.loss_options)
    loss: LossFunction = custom
    return loss
