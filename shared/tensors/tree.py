"""Parameter trees: arithmetic on flat dicts of tensors, keyed as in `state_dict`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from shared.errors import WireError
from shared.protocol.messages import Scalar

CPU = torch.device("cpu")
Tree: TypeAlias = dict[str, Tensor]
_NARROW = frozenset({torch.int8, torch.int16, torch.uint8})
"""Integers whose difference may exceed their range."""


@dataclass(frozen=True, repr=False)
class State:
    """State that outlives a round: tensors by name, and plain facts."""

    tree: Tree = field(default_factory=dict)
    facts: dict[str, Scalar] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Return the sizes only: `asyncio.Runner` formats its result and discards the text."""
        numbers = sum(leaf.numel() for leaf in self.tree.values())
        return f"State({len(self.tree)} tensors of {numbers} numbers, {len(self.facts)} facts)"


@dataclass(frozen=True)
class Mean:
    """A running weighted mean: memory is O(model), however many trees are added.

    Attributes:
        total: Sum of weight times value, leaf by leaf; floating, of 32 bits at least.
        weight: Sum of weights of each leaf: a number, or a tensor of the leaf's shape where trees cover parts.
        facts: Facts from single updates, collected as they are added.
    """

    total: Tree = field(default_factory=dict)
    weight: dict[str, float | Tensor] = field(default_factory=dict)
    facts: dict[str, Scalar] = field(default_factory=dict)


def device_of(leaves: Iterable[Tensor]) -> torch.device:
    """Return the device of some leaves; the CPU if none has storage."""
    return next((leaf.device for leaf in leaves if not leaf.is_meta), CPU)


def to_device(tree: Mapping[str, Tensor], device: torch.device) -> Tree:
    """Return leaves on a device; those already there are not copied."""
    return {key: leaf.to(device) for key, leaf in tree.items()}


def state_to_device(state: State, device: torch.device) -> State:
    """Return a state on a device; leaves already there are not copied."""
    return State(to_device(state.tree, device), state.facts)


def subtract(a: Tree, b: Tree) -> Tree:
    """Return the change from b to a, leaf by leaf: a - b.

    The change of a boolean leaf is true where it differs, so that the mean of several changes is the majority. Integers
    of 8 and 16 bits do not change: their differences may exceed their range.
    """
    return {key: _subtract_leaf(leaf, b[key]) for key, leaf in a.items()}


def _subtract_leaf(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype == torch.bool:
        return a ^ b
    return torch.zeros_like(a) if a.dtype in _NARROW else a - b


def add(a: Tree, b: Tree) -> Tree:
    """Return a + b, leaf by leaf, in the dtype of a; leaves that b lacks are those of a, not copied.

    The sum reuses b's memory, so that a model is not held three times: b must not be used afterwards. A floating b is
    rounded where a holds integers, such as BatchNorm's step counter.
    """
    return {key: _add_leaf(leaf, b[key]) if key in b else leaf for key, leaf in a.items()}


def _add_leaf(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype == torch.bool:
        return a ^ b.round().bool()
    if a.dtype == b.dtype:
        return b.add_(a)
    return a + (b if a.is_floating_point() else b.round()).to(a.dtype)


def accumulate(mean: Mean, tree: Tree, weight: float, coverage: Mapping[str, Tensor] | None = None) -> Mean:
    """Add one tree to a running mean; the given `mean` must not be used afterwards (its tensors are reused).

    Args:
        tree: Leaves of this contributor; missing leaves do not affect the mean.
        weight: Weight of the tree, above zero.
        coverage: Boolean masks, for leaves of which only some coordinates count.
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
    """Sums over examples exceed the range of 16 bits (65 504), and integers cannot hold a mean."""
    return torch.promote_types(leaf.dtype, torch.float32) if leaf.is_floating_point() else torch.float64


def _add_scaled(total: Tensor, value: Tensor, share: float | Tensor) -> None:
    if isinstance(share, float | int):
        total.add_(value, alpha=share)
    else:
        total.addcmul_(value, share.to(total.dtype))


def finish_mean(mean: Mean) -> Tree:
    """Return total / weight; zero where no tree covered a coordinate. Overwrites the mean's tensors."""
    result: Tree = {}
    for key, total in mean.total.items():
        weight = mean.weight[key]
        if isinstance(weight, float | int):
            result[key] = total.div_(weight)
        else:
            result[key] = torch.where(weight > 0, total / weight.clamp_min(torch.finfo(weight.dtype).tiny), 0.0)
    return result


def tree_norm(tree: Mapping[str, Tensor]) -> float:
    """Return the Euclidean norm over all floating leaves; infinite if their squares exceed float32."""
    return math.hypot(*(_leaf_norm(leaf) for leaf in tree.values() if leaf.is_floating_point()))


def _leaf_norm(leaf: Tensor) -> float:
    wide = leaf if leaf.dtype == torch.float32 else leaf.to(torch.promote_types(leaf.dtype, torch.float32))
    return float(torch.linalg.vector_norm(wide))


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the tensor's bytes in C order; a view if it is in that order already."""
    contiguous = tensor.detach().contiguous()  # even for one value or none, with any strides
    return contiguous.as_strided((contiguous.numel(),), (1,)).view(torch.uint8).numpy().data


def check_like(tree: Tree, like: Tree) -> float:
    """Reject a tree with leaves that `like` lacks, or with a non-finite number; meta leaves have no numbers.

    Returns:
        Its `tree_norm`, a by-product of the check; 0 for meta leaves.

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
    """Check the extremes, which propagate NaN as the norm does, without a mask of the leaf's size.

    They cost half as much again as the norm, and are computed only if the norm exceeds the dtype.
    """
    lowest, highest = torch.aminmax(leaf)
    return math.isfinite(lowest.item()) and math.isfinite(highest.item())
