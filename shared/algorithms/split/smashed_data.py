"""Smashed data: check and unpack a device's features and labels.

Zhang, Ni, Wang. Federated Split Learning with Model Pruning and Gradient Quantization in Wireless Networks. The term
and the exchange are from Gupta and Raskar's split learning, https://arxiv.org/abs/1810.06060.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.algorithms.split.cut_shapes import infer_feature_shape, infer_output_shape
from shared.algorithms.split.settings import FedslSettings
from shared.errors import WireError
from shared.models.base import Model
from shared.objectives.training import TrainingObjective
from shared.protocol.messages import Assignment
from shared.protocol.objective import CLASS_KINDS
from shared.tensors import bits
from shared.tensors.feature_dropout import spread
from shared.tensors.tree import State, Tree, check_like

MOST_NUMBERS = 1 << 28
"""Maximum numbers of a batch at the cut, dropped ones included: 1 GiB."""
MOST_AXES = 8


@dataclass(frozen=True)
class SmashedBatch:
    """A device's batch at the cut.

    Attributes:
        features: Of shape (B, ...), with zeros where dropped.
        labels: Targets: int64 of shape (B,), or for other kinds of task as in `Examples.labels`.
        delta: Boolean, the columns or channels that were sent; None for all.
    """

    features: Tensor
    labels: Tensor
    delta: Tensor | None


def check_features(settings: FedslSettings, model: Model, state: State, assignment: Assignment, up: Tree) -> float:
    """Reject features that no server part could use: see `Split.check_features`.

    Convolutions accept images of any size, and a few bytes can claim that huge ones were dropped: where `model.example`
    is known, the shape of the features must match it.

    Raises:
        WireError: A tensor is missing, unknown, or of a dtype or shape that contradicts the others; there are more
            examples than in a batch, a label is out of range, a number is NaN or infinite.
    """
    sparse = bool(settings.drop) and settings.granularity != "element"
    if set(up) != {"features", "labels", *(("keep", "shape") if sparse else ())}:
        raise WireError(f"tensors {', '.join(map(repr, sorted(up)))}", reason="unknown-tensor")
    features, labels = up["features"], up["labels"]
    if labels.dtype not in _label_types(model.objective) or features.dtype != torch.float32:
        raise WireError(f"features of {features.dtype}, labels of {labels.dtype}", reason="dtype")
    if not 1 <= len(labels) <= assignment.largest_batch or features.ndim < 2:  # noqa: PLR2004 - examples and features
        raise WireError(f"labels of shape {tuple(labels.shape)} for batches of {assignment.largest_batch}")
    if len(features) != len(labels):
        raise WireError(f"{len(features)} features with {len(labels)} labels", reason="shape")
    norm = check_like({"features": features}, {"features": features})
    shape, cut = _sparse_shape(settings, up) if sparse else tuple(features.shape), settings.cut_of(model)
    if model.example and shape[1:] != (expected := infer_feature_shape(model, cut, state.tree)):
        raise WireError(
            f"an example has features of shape {shape[1:]}, one of {model.example} has {expected}", reason="shape"
        )
    _check_labels(model.objective, labels, infer_output_shape(model, cut, state.tree, shape))
    return norm


def _label_types(objective: TrainingObjective) -> frozenset[torch.dtype]:
    if objective.kind == "custom":
        return frozenset({torch.uint8, torch.int64, torch.float32})
    return frozenset({torch.uint8, torch.int64} if objective.kind in CLASS_KINDS else {torch.float32})


def _check_labels(objective: TrainingObjective, labels: Tensor, outputs: tuple[int, ...]) -> None:
    """Reject targets that the loss could not compare with outputs of this shape for an example."""
    if objective.kind not in CLASS_KINDS:
        if not torch.isfinite(labels).all():
            raise WireError("a target is NaN or infinite", reason="not-finite")
        if objective.kind != "custom" and math.prod(labels.shape[1:]) != math.prod(outputs):
            raise WireError(f"targets of shape {tuple(labels.shape[1:])} for outputs of {outputs}", reason="shape")
        return
    if tuple(labels.shape[1:]) != outputs[1:]:
        raise WireError(f"labels of shape {tuple(labels.shape[1:])} for outputs of {outputs}", reason="shape")
    if labels.min() < 0 or labels.max() >= outputs[0]:
        raise WireError(f"a label is not in 0 to {outputs[0] - 1}", reason="label")


def _sparse_shape(settings: FedslSettings, up: Tree) -> tuple[int, ...]:
    """Return the shape of the features with the dropped ones."""
    rows, keep, extents = up["features"], up["keep"], up["shape"]
    if keep.dtype != torch.uint8 or extents.dtype != torch.int32 or keep.ndim != 1 or extents.ndim != 1:
        raise WireError(f"keep of {keep.dtype}, shape of {extents.dtype}", reason="dtype")
    if not 1 <= len(extents) < MOST_AXES or extents.min() < 1:
        raise WireError(f"features of {len(extents)} axes", reason="shape")
    shape = (len(rows), *extents.tolist())
    if math.prod(shape) > MOST_NUMBERS:
        raise WireError(f"features of shape {shape} are too many", reason="shape")
    delta = _read_delta(settings, up, shape)
    if rows.shape != (shape[0], int(delta.sum()) * (math.prod(shape[1:]) // len(delta))):
        raise WireError(f"features of shape {tuple(rows.shape)}, where {int(delta.sum())} are kept", reason="shape")
    return shape


def _read_delta(settings: FedslSettings, up: Tree, shape: tuple[int, ...]) -> Tensor:
    count = shape[1] if settings.granularity == "channel" else math.prod(shape[1:])
    return torch.from_numpy(bits.unpack(up["keep"].numpy(force=True), count, 1)).bool().to(up["keep"].device)


def unpack_features(settings: FedslSettings, up: Tree) -> SmashedBatch:
    """Return a checked batch."""
    features, labels = up["features"], up["labels"]
    labels = labels if labels.is_floating_point() else labels.long()
    if "keep" not in up:
        return SmashedBatch(features, labels, None)
    shape = (len(features), *up["shape"].tolist())
    delta = _read_delta(settings, up, shape)
    return SmashedBatch(spread(features, delta, shape), labels, delta)
