"""What a device sends at a step of a split session, checked and unpacked by the server.

Zhang, Ni, Wang. Federated Split Learning with Model Pruning and Gradient Quantization in Wireless Networks; smashed
data, features at the cut with labels, are those of Gupta and Raskar's split learning, https://arxiv.org/abs/1810.06060.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shared.algorithms.split.settings import MATRIX, Settings
from shared.codecs import bits
from shared.errors import WireError
from shared.models.base import Model
from shared.models.mode import in_mode
from shared.protocol.messages import Assignment
from shared.tensors.feature_dropout import spread
from shared.tensors.tree import State, Tree, check_like

MOST_NUMBERS = 1 << 28
"""Of a batch at the cut, dropped ones included: 1 GiB of them."""
MOST_AXES = 8
MOST_SHAPES = 16
"""Of features whose outputs are remembered: a device can name more than any session has."""
_outputs: WeakKeyDictionary[nn.Module, dict[tuple[int, bool, tuple[int, ...]], int]] = WeakKeyDictionary()
"""By network, then by cut, whether the batch is of one, and shape without the batch: each try passes an example."""
_features: WeakKeyDictionary[nn.Module, dict[tuple[int, tuple[int, ...]], tuple[int, ...]]] = WeakKeyDictionary()
"""By network, then by cut and shape of an input: its features' shape."""


@dataclass(frozen=True)
class Smashed:
    """A device's batch at the cut.

    Attributes:
        features: Of shape (B, ...), with zeros for what was dropped.
        labels: int64 of shape (B,).
        delta: Which columns or channels are there, boolean; None for all.
    """

    features: Tensor
    labels: Tensor
    delta: Tensor | None


def admit(settings: Settings, model: Model, state: State, assignment: Assignment, up: Tree) -> None:
    """Refuse what no server part could take: see `Algorithm.admit`.

    A part of convolutions takes pictures of any size, and a few bytes can say that huge ones were dropped: where
    `model.example` is known, features are as many as one like it has.

    Raises:
        WireError: A tensor is missing, unknown, or of another dtype or shape than the others say; there are more
            examples than a batch has, a label is of no class, a number is NaN or infinite.
    """
    sparse = bool(settings.drop) and settings.granularity != "element"
    if set(up) != {"features", "labels", *(("keep", "shape") if sparse else ())}:
        raise WireError(f"tensors {', '.join(map(repr, sorted(up)))}", reason="unknown-tensor")
    features, labels = up["features"], up["labels"]
    if labels.dtype not in {torch.uint8, torch.int64} or features.dtype != torch.float32:
        raise WireError(f"features of {features.dtype}, labels of {labels.dtype}", reason="dtype")
    if not 1 <= labels.numel() <= assignment.hyper.batch_size or labels.ndim != 1 or features.ndim < 2:  # noqa: PLR2004
        raise WireError(f"labels of shape {tuple(labels.shape)} for batches of {assignment.hyper.batch_size}")
    if len(features) != len(labels):
        raise WireError(f"{len(features)} features with {len(labels)} labels", reason="shape")
    check_like({"features": features}, {"features": features})
    shape, cut = _sparse_shape(settings, up) if sparse else tuple(features.shape), settings.cut_of(model)
    if model.example and shape[1:] != (own := _at_cut(model, cut, state.tree)):
        raise WireError(
            f"an example has features of shape {shape[1:]}, one of {model.example} has {own}", reason="shape"
        )
    classes = _classes(model, cut, state.tree, shape)
    if labels.min() < 0 or labels.max() >= classes:
        raise WireError(f"a label is not in 0 to {classes - 1}", reason="label")


def _sparse_shape(settings: Settings, up: Tree) -> tuple[int, ...]:
    """Return the shape that features have with what was dropped."""
    rows, keep, extents = up["features"], up["keep"], up["shape"]
    if keep.dtype != torch.uint8 or extents.dtype != torch.int32 or keep.ndim != 1 or extents.ndim != 1:
        raise WireError(f"keep of {keep.dtype}, shape of {extents.dtype}", reason="dtype")
    if not 1 <= len(extents) < MOST_AXES or extents.min() < 1:
        raise WireError(f"features of {len(extents)} axes", reason="shape")
    shape = (len(rows), *extents.tolist())
    if math.prod(shape) > MOST_NUMBERS:
        raise WireError(f"features of shape {shape} are too many", reason="shape")
    delta = _delta(settings, up, shape)
    if rows.shape != (shape[0], int(delta.sum()) * (math.prod(shape[1:]) // len(delta))):
        raise WireError(f"features of shape {tuple(rows.shape)}, where {int(delta.sum())} are kept", reason="shape")
    return shape


@torch.no_grad()
def _at_cut(model: Model, cut: int, tree: Tree) -> tuple[int, ...]:
    """Return the shape of the features of an input as the model says it is made for; tried once, with zeros."""
    known, key = _features.setdefault(model.layers, {}), (cut, model.example)
    if key not in known:
        bottom = model.below(cut)
        leaves = {name: tree[name] for name in bottom.state_dict()}
        with in_mode(model.layers, train=False):
            known[key] = tuple(functional_call(bottom, leaves, (torch.zeros(1, *model.example),)).shape[1:])
    return known[key]


def _classes(model: Model, cut: int, tree: Tree, shape: tuple[int, ...]) -> int:
    """Return how many outputs the server part has for features of shape (B, ...), which follows from shapes alone."""
    key = cut, shape[0] == 1, shape[1:]
    known = _outputs.setdefault(model.layers, {})
    if key not in known:
        found = _tried(model, cut, tree, shape)  # of shapes that go on; the others are tried whenever they come
        if len(known) >= MOST_SHAPES:
            known.clear()
        known[key] = found
    return known[key]


@torch.no_grad()
def _tried(model: Model, cut: int, tree: Tree, shape: tuple[int, ...]) -> int:
    """Return how many outputs there are for one example of features of shape (B, ...).

    Not without storage, which would cost no arithmetic: torch imports a compiler for it. A batch of one is tried as it
    will be trained on, which BatchNorm may refuse.
    """
    top = model.above(cut)
    buffers = dict(top.named_buffers())
    leaves = {name: tree[name].clone() if name in buffers else tree[name] for name in top.state_dict()}
    try:
        with in_mode(model.layers, train=shape[0] == 1):
            outputs = functional_call(top, leaves, (torch.zeros(1, *shape[1:]),))
    except (RuntimeError, ValueError) as error:
        problem = str(error).partition("\n")[0]
        raise WireError(f"features of shape {shape} do not go on ({problem})", reason="shape") from error
    if outputs.ndim != MATRIX or len(outputs) != 1:
        raise WireError(f"outputs of shape {tuple(outputs.shape)}", reason="shape")
    return int(outputs.shape[1])


def _delta(settings: Settings, up: Tree, shape: tuple[int, ...]) -> Tensor:
    count = shape[1] if settings.granularity == "channel" else math.prod(shape[1:])
    return torch.from_numpy(bits.unpack(up["keep"].numpy(), count, 1)).bool()


def unpacked(settings: Settings, up: Tree) -> Smashed:
    """Return a batch that was admitted."""
    features, labels = up["features"], up["labels"].long()
    if "keep" not in up:
        return Smashed(features, labels, None)
    shape = (len(features), *up["shape"].tolist())
    delta = _delta(settings, up, shape)
    return Smashed(spread(features, delta, shape), labels, delta)
