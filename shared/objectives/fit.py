"""Checks that a network's outputs fit the targets of some examples, before any training."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from shared.errors import ConfigError
from shared.objectives.base import Objective
from shared.protocol.objective import CLASS_KINDS


def require_fit(objective: Objective, outputs: Sequence[int], inputs: Tensor, labels: Tensor, place: str) -> None:
    """Reject targets that do not fit a network's outputs.

    Args:
        outputs: Shape of the output for one example.
        inputs: Of shape (N, ...).
        labels: Targets of shape (N, ...), N at least 1.
        place: Section that describes the network, for messages.

    Raises:
        ConfigError: Shapes or types do not fit, or a class number is out of range; both shapes are named.
    """
    if objective.kind == "custom":
        return
    if objective.reconstructs:
        if tuple(outputs) != tuple(inputs.shape[1:]):
            raise ConfigError(
                f"{place}: it returns the shape {_show(outputs)} for examples of shape {_show(inputs.shape[1:])}; an "
                "autoencoder must return the shape of its input"
            )
        return
    if objective.kind in CLASS_KINDS:
        _require_classes(objective, outputs, labels, place)
        return
    if not labels.is_floating_point():
        raise ConfigError(
            f"{place}: kind {objective.kind!r} needs numbers as targets, and the data have class numbers; set "
            "target_columns of [data], or another [task] kind"
        )
    if math.prod(outputs) != math.prod(labels.shape[1:]):
        raise ConfigError(
            f"{place}: it returns the shape {_show(outputs)} for an example, and the targets have the shape "
            f"{_show(labels.shape[1:])}; correct its options, or the target columns"
        )


def _require_classes(objective: Objective, outputs: Sequence[int], labels: Tensor, place: str) -> None:
    if labels.is_floating_point():
        raise ConfigError(
            f"{place}: kind {objective.kind!r} needs class numbers, and the data have numbers of shape "
            f"{_show(labels.shape[1:])} as targets; set [task] kind, such as regression"
        )
    if tuple(outputs[1:]) != tuple(labels.shape[1:]):
        raise ConfigError(
            f"{place}: it returns the shape {_show(outputs)} for an example, and the targets have the shape "
            f"{_show(labels.shape[1:])}; the first axis is the classes, the others must be equal"
        )
    if (most := int(labels.max())) >= outputs[0]:
        raise ConfigError(
            f"{place}: {outputs[0]} outputs for labels up to {most}; set its option `classes` to {most + 1}"
        )
    weights = objective.spec.class_weights
    if weights and len(weights) != outputs[0]:
        raise ConfigError(f"task.class_weights: {len(weights)} weights for {outputs[0]} classes; give one for each")


def _show(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"
