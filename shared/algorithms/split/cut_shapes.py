"""Shapes of a split network's features and of the server part's outputs.

Features at the cut are those of O. Gupta and R. Raskar's split learning, https://arxiv.org/abs/1810.06060.
"""

from __future__ import annotations

import math
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shared.algorithms.split.settings import MATRIX
from shared.errors import WireError
from shared.models.base import Model
from shared.models.evaluate import training_mode
from shared.tensors.tree import Tree, device_of

MAX_CACHED_SHAPES = 16
"""Maximum number of cached feature shapes: a device can send more shapes than any session has."""
_outputs: WeakKeyDictionary[nn.Module, dict[tuple[int, bool, tuple[int, ...]], tuple[int, ...]]] = WeakKeyDictionary()
"""Cache of output counts by network, then by (cut, batch of one, shape without the batch): each trial costs a pass."""
_features: WeakKeyDictionary[nn.Module, dict[tuple[int, tuple[int, ...]], tuple[int, ...]]] = WeakKeyDictionary()
"""Cache of feature shapes by network, then by (cut, input shape)."""


@torch.no_grad()
def infer_feature_shape(model: Model, cut: int, tree: Tree) -> tuple[int, ...]:
    """Return the shape of one example's features at the cut; computed once, from zeros.

    Args:
        model: With an `example`, with or without storage.
        tree: At least the leaves below the cut.
    """
    cache, key = _features.setdefault(model.layers, {}), (cut, model.example)
    if key not in cache:
        bottom = model.below(cut)
        leaves = {name: tree[name] for name in bottom.state_dict()}
        with training_mode(model.chain, train=False):
            example = torch.zeros((1, *model.example), device=device_of(leaves.values()))
            cache[key] = tuple(functional_call(bottom, leaves, (example,)).shape[1:])
    return cache[key]


@torch.no_grad()
def measure_feature_rms(model: Model, cut: int, tree: Tree, inputs: Tensor) -> float:
    """Return the root mean square of a batch's features, as a device that trains on it would send them.

    Args:
        model: With or without storage.
        tree: At least the leaves below the cut.
        inputs: Of shape (N, ...); random layers draw from torch's global generator.
    """
    bottom = model.below(cut)
    leaves = {name: tree[name].clone() for name in bottom.state_dict()}  # running statistics are written to
    with training_mode(model.chain, train=len(inputs) > 1):
        features = functional_call(bottom, leaves, (inputs,))
    return float(torch.linalg.vector_norm(features)) / math.sqrt(max(features.numel(), 1))


def infer_output_shape(model: Model, cut: int, tree: Tree, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the server part's output for one example of features of a shape.

    Args:
        model: With or without storage.
        tree: At least the leaves above the cut.
        shape: Shape of the features, (B, ...).

    Raises:
        WireError: The server part does not accept such features.
    """
    key = cut, shape[0] == 1, shape[1:]
    cache = _outputs.setdefault(model.layers, {})
    if key not in cache:
        outputs = _try_outputs(model, cut, tree, shape)  # accepted shapes are cached, others raise on every call
        if len(cache) >= MAX_CACHED_SHAPES:
            cache.clear()
        cache[key] = outputs
    return cache[key]


@torch.no_grad()
def _try_outputs(model: Model, cut: int, tree: Tree, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the output for one example of features of shape (B, ...).

    Computed with storage: without, torch would import a compiler. A batch of one is tried in training mode, which
    BatchNorm may reject.
    """
    top = model.above(cut)
    buffers = dict(top.named_buffers())
    leaves = {name: tree[name].clone() if name in buffers else tree[name] for name in top.state_dict()}
    try:
        with training_mode(model.chain, train=shape[0] == 1):
            example = torch.zeros((1, *shape[1:]), device=device_of(leaves.values()))
            outputs = functional_call(top, leaves, (example,))
    except (RuntimeError, ValueError) as error:
        problem = str(error).partition("\n")[0]
        raise WireError(
            f"features of shape {shape} are not accepted by the server part ({problem})", reason="shape"
        ) from error
    if outputs.ndim < MATRIX or len(outputs) != 1:
        raise WireError(f"outputs of shape {tuple(outputs.shape)}", reason="shape")
    return tuple(outputs.shape[1:])
