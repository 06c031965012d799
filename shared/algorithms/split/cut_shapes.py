"""Shapes at the cut of a network: of the features of one input, and whether the layers above take what comes.

How large features are that the network itself makes.

What crosses the cut is that of O. Gupta and R. Raskar's split learning, https://arxiv.org/abs/1810.06060.
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
from shared.models.evaluate import in_mode
from shared.tensors.placement import device_of
from shared.tensors.tree import Tree

MOST_SHAPES = 16
"""Of features whose outputs are remembered: a device can name more than any session has."""
_outputs: WeakKeyDictionary[nn.Module, dict[tuple[int, bool, tuple[int, ...]], int]] = WeakKeyDictionary()
"""By network, then by cut, whether the batch is of one, and shape without the batch: each try passes an example."""
_features: WeakKeyDictionary[nn.Module, dict[tuple[int, tuple[int, ...]], tuple[int, ...]]] = WeakKeyDictionary()
"""By network, then by cut and shape of an input: its features' shape."""


@torch.no_grad()
def features_at_cut(model: Model, cut: int, tree: Tree) -> tuple[int, ...]:
    """Return the shape of the features of an input as the model says it is made for; tried once, with zeros.

    Args:
        model: Of any storage, or none; with an `example`.
        cut: Where it is cut.
        tree: At least the leaves below.
    """
    known, key = _features.setdefault(model.layers, {}), (cut, model.example)
    if key not in known:
        bottom = model.below(cut)
        leaves = {name: tree[name] for name in bottom.state_dict()}
        with in_mode(model.layers, train=False):
            one = torch.zeros(1, *model.example, device=device_of(leaves.values()))
            known[key] = tuple(functional_call(bottom, leaves, (one,)).shape[1:])
    return known[key]


@torch.no_grad()
def feature_size(model: Model, cut: int, tree: Tree, inputs: Tensor) -> float:
    """Return the root mean square of the features of a batch, as a device that trains on it would send them.

    Args:
        model: Of any storage, or none.
        cut: Where it is cut.
        tree: At least the leaves below.
        inputs: Of shape (N, ...); what the layers draw, they draw from torch's global generator.
    """
    bottom = model.below(cut)
    leaves = {name: tree[name].clone() for name in bottom.state_dict()}  # running statistics are written to
    with in_mode(model.layers, train=len(inputs) > 1):
        features = functional_call(bottom, leaves, (inputs,))
    return float(torch.linalg.vector_norm(features)) / math.sqrt(max(features.numel(), 1))


def count_outputs(model: Model, cut: int, tree: Tree, shape: tuple[int, ...]) -> int:
    """Return how many outputs the server part has for features, which follows from shapes alone.

    Args:
        model: Of any storage, or none.
        cut: Where it is cut.
        tree: At least the leaves above.
        shape: Of the features, (B, ...).

    Raises:
        WireError: It cannot take such features.
    """
    key = cut, shape[0] == 1, shape[1:]
    known = _outputs.setdefault(model.layers, {})
    if key not in known:
        found = _try_outputs(model, cut, tree, shape)  # of shapes that go on; the others are tried whenever they come
        if len(known) >= MOST_SHAPES:
            known.clear()
        known[key] = found
    return known[key]


@torch.no_grad()
def _try_outputs(model: Model, cut: int, tree: Tree, shape: tuple[int, ...]) -> int:
    """Return how many outputs there are for one example of features of shape (B, ...).

    Not without storage, which would cost no arithmetic: torch imports a compiler for it. A batch of one is tried as it
    will be trained on, which BatchNorm may refuse.
    """
    top = model.above(cut)
    buffers = dict(top.named_buffers())
    leaves = {name: tree[name].clone() if name in buffers else tree[name] for name in top.state_dict()}
    try:
        with in_mode(model.layers, train=shape[0] == 1):
            one = torch.zeros(1, *shape[1:], device=device_of(leaves.values()))
            outputs = functional_call(top, leaves, (one,))
    except (RuntimeError, ValueError) as error:
        problem = str(error).partition("\n")[0]
        raise WireError(f"features of shape {shape} do not go on ({problem})", reason="shape") from error
    if outputs.ndim != MATRIX or len(outputs) != 1:
        raise WireError(f"outputs of shape {tuple(outputs.shape)}", reason="shape")
    return int(outputs.shape[1])
