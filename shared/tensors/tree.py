"""Arithmetic on parameter trees: flat dicts of tensors keyed as in `state_dict`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from shared.errors import WireError
from shared.protocol.messages import Scalar

Tree: TypeAlias = dict[str, Tensor]


@dataclass(frozen=True, repr=False)
class State:
    """What outlives a round: tensors by name, and plain facts beside them."""

    tree: Tree = field(default_factory=dict)
    facts: dict[str, Scalar] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Say how much it is, and no number: `asyncio.Runner` asks for this of what it returns, and drops it."""
        numbers = sum(leaf.numel() for leaf in self.tree.values())
        return f"State({len(self.tree)} tensors of {numbers} numbers, {len(self.facts)} facts)"


@dataclass(frozen=True)
class Mean:
    """A weighted mean on its way: memory is O(model), however many trees are added.

    Attributes:
        total: Sum of weight times value, leaf by leaf; floating, of 32 bits at least.
        weight: Weight that went into each leaf: a number, or a tensor of the leaf's shape where trees cover parts.
        facts: What single updates said besides; whoever adds an update adds to it.
    """

    total: Tree = field(default_factory=dict)
    weight: dict[str, float | Tensor] = field(default_factory=dict)
    facts: dict[str, Scalar] = field(default_factory=dict)


def subtract(a: Tree, b: Tree) -> Tree:
    """Return a - b, leaf by leaf."""
    return {key: a[key] - b[key] for key in a}


def add(a: Tree, b: Tree) -> Tree:
    """Return a + b, leaf by leaf, in the dtype of a; leaves that b lacks are a's own, not copied.

    The sum takes b's place in memory, so that a model is not held three times: b must not be used afterwards.
    A floating b is rounded where a holds integers, as BatchNorm's step counter does.
    """
    return {key: _add_leaf(leaf, b[key]) if key in b else leaf for key, leaf in a.items()}


def _add_leaf(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype == b.dtype:
        return b.add_(a)
    return a + (b if a.is_floating_point() else b.round()).to(a.dtype)


def accumulate(mean: Mean, tree: Tree, weight: float, coverage: Mapping[str, Tensor] | None = None) -> Mean:
    """Add one tree to a running mean; the given `mean` must not be used afterwards (its tensors are reused).

    Args:
        mean: What was added before.
        tree: Leaves this contributor holds; a leaf it lacks leaves the mean of that leaf alone.
        weight: Its weight, above zero.
        coverage: Boolean masks, for leaves of which it holds some coordinates only.
    """
    coverage = coverage or {}
    for key, leaf in tree.items():
        mask = coverage.get(key)
        share = weight if mask is None else mask.to(torch.float32) * weight
        value = leaf.to(_summing_dtype(leaf))
        if key not in mean.total:
            mean.total[key] = value * share
            mean.weight[key] = share
        else:
            _add_scaled(mean.total[key], value, share)
            mean.weight[key] = mean.weight[key] + share
    return Mean(mean.total, mean.weight, mean.facts)


def _summing_dtype(leaf: Tensor) -> torch.dtype:
    """16 bits end at 65 504, which is no room for a sum over examples; integers hold no mean."""
    return torch.promote_types(leaf.dtype, torch.float32) if leaf.is_floating_point() else torch.float64


def _add_scaled(total: Tensor, value: Tensor, share: float | Tensor) -> None:
    if isinstance(share, float | int):
        total.add_(value, alpha=share)
    else:
        total.addcmul_(value, share.to(total.dtype))


def finish_mean(mean: Mean) -> Tree:
    """Return total / weight; zero where nobody held a coordinate. Uses up the mean's tensors."""
    result: Tree = {}
    for key, total in mean.total.items():
        weight = mean.weight[key]
        if isinstance(weight, float | int):
            result[key] = total.div_(weight)
        else:
            result[key] = torch.where(weight > 0, total / weight.clamp_min(torch.finfo(weight.dtype).tiny), 0.0)
    return result


def tree_norm(tree: Mapping[str, Tensor]) -> float:
    """Return the Euclidean norm over all floating leaves; infinite where their squares are beyond float32."""
    return math.hypot(*(_leaf_norm(leaf) for leaf in tree.values() if leaf.is_floating_point()))


def _leaf_norm(leaf: Tensor) -> float:
    wide = leaf if leaf.dtype == torch.float32 else leaf.to(torch.promote_types(leaf.dtype, torch.float32))
    return float(torch.linalg.vector_norm(wide))


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the tensor's bytes in C order; a view where it lies so already."""
    whole = tensor.detach().contiguous()  # of one value or none, whatever its strides are
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8).numpy().data


def check_like(tree: Tree, like: Tree) -> float:
    """Refuse a tree that is not made of leaves of `like`, or holds a number that is none; a meta leaf holds none.

    Returns:
        Its `tree_norm`, which the check takes anyway; of meta leaves 0.

    Raises:
        WireError: A key is unknown, a shape or dtype differs, or a value is NaN or infinite.
    """
    norms = list[float]()
    for key, leaf in tree.items():
        if key not in like:
            raise WireError(f"unknown tensor {key!r}", reason="unknown-tensor")
        if leaf.shape != like[key].shape:
            raise WireError(f"{key!r} of shape {tuple(leaf.shape)}, not {tuple(like[key].shape)}", reason="shape")
        if leaf.dtype != like[key].dtype:
            raise WireError(f"{key!r} of {leaf.dtype}, not {like[key].dtype}", reason="dtype")
        if leaf.is_floating_point() and not leaf.is_meta and leaf.numel():
            norms.append(_leaf_norm(leaf))
            if not math.isfinite(norms[-1]) and not _is_finite(leaf):
                raise WireError(f"{key!r} holds NaN or infinity", reason="not-finite")
    return math.hypot(*norms)


def _is_finite(leaf: Tensor) -> bool:
    """Tell by the extremes, which propagate NaN, as the norm does: no mask of the leaf's size is made.

    They cost half as much again as the norm, and are asked only where that is beyond the dtype.
    """
    lowest, highest = torch.aminmax(leaf)
    return math.isfinite(lowest.item()) and math.isfinite(highest.item())
