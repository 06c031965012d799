"""Train a network's active neurons only, without computing the frozen ones' gradients.

Z. Niu, H. Dong, A. K. Qin: FedSPU, AAAI 2025, equations (3) and (4). https://arxiv.org/abs/2403.11464

    w[j] <- w[j] - eta dF/dw[j]  for j active;  w[j] unchanged for all others, which still take part in F

Once a round, neurons are permuted so that the active ones come first. A trained leaf is a view of the first rows and
columns of a weight: an optimizer changes it in place, has momentum for it alone, and cannot reach the rest. Masks and
gradient hooks would do the same at more than the cost of training everything.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shared.errors import ConfigError
from shared.models.chain import named_layers
from shared.subnetworks.frozen_activations import FlattenStep, OtherStep, ReluStep, build_other, build_pooling
from shared.subnetworks.frozen_layers import NormStep, Step, WeightedStep, convolution_geometry
from shared.subnetworks.frozen_payoff import is_worth_freezing
from shared.subnetworks.neurons import Active, Index, extract, merge, read_chain
from shared.tensors.tree import Tree

_WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
_IMAGES = 4
"""Axes of a weight that is stored channels last."""


@dataclass(frozen=True)
class FrozenNetwork:
    """A network whose active part trains; call it on inputs, then call backward on the loss.

    Attributes:
        lowest: Position of the first step with something to train: the error signal ends there.
        leaves: All leaves, active neurons first.
        weights: Leaves to train by name, views of the active part of `leaves`.
        index: Active rows and columns, in the network's order.
        order: Positions of the rows and columns of `leaves` in that order.
        keys: Names of all leaves of the network, in its order.
        fixed_leaves: Leaves that never change: counts of batches, running statistics of frozen neurons.
        plain: The network itself, made of `leaves`, if torch's backward is faster than the steps'.
    """

    steps: Sequence[Step]
    lowest: int
    leaves: Tree
    weights: Tree
    index: Index
    order: Index
    keys: tuple[str, ...]
    fixed_leaves: Tree
    plain: nn.Sequential | None = None

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return outputs, in training mode."""
        arguments = self.steps, self.lowest, tuple(self.weights), inputs, *self.weights.values()
        outputs: Tensor = self.plain(inputs) if self.plain else _Pass.apply(*arguments)  # type: ignore[no-untyped-call]
        return outputs

    def part(self) -> Tree:
        """Return copies of the active part, running statistics included, for the update."""
        return {key: _view_active(leaf, *self.index[key]).clone() for key, leaf in self.leaves.items()}

    def tree(self) -> Tree:
        """Return all parameters and buffers in the network's order; frozen ones are unchanged bit for bit."""
        restored = extract(self.leaves, {key: _invert_order(*self.order[key]) for key in self.leaves})
        fixed = {key: self.index[key] for key in self.fixed_leaves if key in self.index}
        restored |= merge(self.fixed_leaves, extract(restored, fixed), fixed)
        return {key: _copy_if_same(restored[key], self.leaves.get(key)) for key in self.keys}


def freeze(
    layers: nn.Sequential,
    tree: Tree,
    active: Active,
    batch: Sequence[int] = (),
    *,
    detached: bool = False,
    drifting: bool = False,
) -> FrozenNetwork:
    """Make the active neurons of a network trainable.

    Args:
        layers: The network, with or without storage; only its shape is read.
        tree: Parameters and buffers; they are copied.
        active: Neurons to train, by hidden layer.
        batch: Shape of a step's inputs. If given, a network for which the custom backward is slower computes all
            gradients by torch, and uses those of its active part.
        detached: Whether the error signal ends at frozen neurons. It saves time and memory, and changes the gradient.
        drifting: Whether running statistics of frozen neurons are updated.

    Raises:
        ConfigError: The network is not a plain chain of layers.
    """
    index = read_chain(layers).index(active)
    order = {key: _order_leaf(tree[key], *index[key]) for key in index}
    leaves = {key: _copy_layout(extract(tree, {key: order[key]})[key], tree[key]) for key in order}
    names = {key for key, _ in layers.named_parameters()}
    weights = {key: _view_active(leaf, *index[key]).detach() for key, leaf in leaves.items() if key in names}
    fixed_leaves = {
        key: leaf.clone() for key, leaf in tree.items() if key not in index or (key not in names and not drifting)
    }
    steps = _build_steps(layers, leaves, index, detached=detached)
    lowest = next(place for place, step in enumerate(steps) if isinstance(step, WeightedStep | NormStep))
    for leaf in weights.values():
        leaf.requires_grad_(True)
    plain = (
        None
        if not batch or detached or is_worth_freezing(layers, index, batch)
        else _build_plain(layers, leaves, weights)
    )
    return FrozenNetwork(steps, lowest, leaves, weights, index, order, tuple(tree), fixed_leaves, plain)


def _build_plain(layers: nn.Sequential, leaves: Tree, weights: Tree) -> nn.Sequential:
    """Return the network in the memory of `leaves`; its backward gives the weights their part of the gradients."""
    network = copy.deepcopy(layers).train()
    network.load_state_dict(leaves, strict=False, assign=True)  # without counts of batches, which are not read
    for name, leaf in network.named_parameters():
        leaf.register_post_accumulate_grad_hook(partial(_copy_gradient, weights[name]))
    return network


def _copy_gradient(weight: Tensor, leaf: Tensor) -> None:
    assert leaf.grad is not None
    active_part = leaf.grad[tuple(slice(size) for size in weight.shape)]
    weight.grad, leaf.grad = active_part.clone() if weight.grad is None else weight.grad + active_part, None


def _build_steps(layers: nn.Sequential, leaves: Tree, index: Index, *, detached: bool) -> list[Step]:
    """Build the steps; a ReLU is moved behind the pooling layer that follows it, where it computes less."""
    ordered = [(name, layer) for name, layer in named_layers(layers) if not isinstance(layer, nn.Identity)]
    for place, (_, layer) in enumerate(ordered[1:], 1):
        if type(layer) is nn.MaxPool2d and type(ordered[place - 1][1]) is nn.ReLU:
            ordered[place - 1], ordered[place] = ordered[place], ordered[place - 1]
    steps: list[Step] = []
    rows: int | None = None
    for name, layer in ordered:
        if type(layer) in _WEIGHTED:
            below = [type(step) for step in steps if isinstance(step, WeightedStep | NormStep)]
            narrow = below[:1] == [WeightedStep] and below.count(WeightedStep) == 1
            step = _build_weighted(name, layer, leaves, index, detached=detached, narrow=narrow)
            steps.append(step)
            rows = step.rows if detached or not below else None  # the lowest layer propagates no error signal
        elif type(layer) in _NORMS:
            steps.append(_build_norm(name, layer, leaves, index, narrow=rows is not None))
        else:
            steps.append(_build_unweighted(layer, rows, steps))
    return steps


def _build_weighted(
    name: str, layer: nn.Module, leaves: Tree, index: Index, *, detached: bool, narrow: bool
) -> WeightedStep:
    weight = leaves[f"{name}.weight"]
    rows, columns = _view_active(weight, *index[f"{name}.weight"]).shape[:2]
    shape = convolution_geometry(layer) if isinstance(layer, nn.Conv1d | nn.Conv2d) else None
    return WeightedStep(name, weight, leaves.get(f"{name}.bias"), rows, columns, detached, narrow, shape)


def _build_norm(name: str, layer: nn.Module, leaves: Tree, index: Index, *, narrow: bool) -> NormStep:
    assert isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d)
    if layer.momentum is None:
        raise ConfigError(f"model: layer {name} is a BatchNorm of all batches so far; give it a momentum")
    tensors = [leaves.get(f"{name}.{kind}") for kind in ("weight", "bias", "running_mean", "running_var")]
    chosen = next((index[key][0] for key in index if key.startswith(f"{name}.")), None)
    rows = layer.num_features if chosen is None else len(chosen)
    return NormStep(name, tensors[0], tensors[1], tensors[2], tensors[3], rows, narrow, layer.momentum, layer.eps)


def _build_unweighted(layer: nn.Module, rows: int | None, before: Sequence[Step]) -> Step:
    match layer:
        case nn.ReLU():
            return ReluStep(rows, fresh=_can_overwrite(before))
        case nn.MaxPool2d():
            return build_pooling(layer, rows)
        case nn.Flatten():
            return FlattenStep(rows)
    return build_other(layer, rows)


def _can_overwrite(before: Sequence[Step]) -> bool:
    """Return True if no other layer reads these outputs again: they are neither the input nor saved for a backward."""
    return next(
        (not isinstance(step, OtherStep) for step in reversed(before) if not isinstance(step, FlattenStep)), False
    )


def _order_leaf(leaf: Tensor, rows: Tensor | None, columns: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    return _order_axis(leaf.shape[0], rows), None if columns is None else _order_axis(leaf.shape[1], columns)


def _order_axis(count: int, chosen: Tensor | None) -> Tensor | None:
    if chosen is None:
        return None
    others = torch.ones(count, dtype=torch.bool, device=chosen.device).index_fill_(0, chosen, False)
    return torch.cat([chosen, others.nonzero().flatten()])


def _invert_order(rows: Tensor | None, columns: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    return None if rows is None else rows.argsort(), None if columns is None else columns.argsort()


def _view_active(leaf: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    """Return a view of the first rows and columns, as many as are active."""
    leaf = leaf if rows is None else leaf[: len(rows)]
    return leaf if columns is None else leaf[:, : len(columns)]


def _copy_if_same(leaf: Tensor, other: Tensor | None) -> Tensor:
    return leaf.clone() if leaf is other else leaf


def _copy_layout(leaf: Tensor, source: Tensor) -> Tensor:
    """Return a copy in the memory layout for convolutions, whose strides determine those of the outputs."""
    if leaf.ndim == _IMAGES:
        return leaf.clone(memory_format=torch.channels_last)
    return leaf.clone() if leaf is source else leaf


class _Pass(torch.autograd.Function):
    """The whole chain as one autograd function that saves only the steps' tensors."""

    @staticmethod
    def forward(
        ctx: Any, steps: Sequence[Step], lowest: int, names: tuple[str, ...], inputs: Tensor, *_leaves: Tensor
    ) -> Tensor:
        saved: list[Tensor] = []
        ctx.steps, ctx.lowest, ctx.names, ctx.counts, ctx.notes = steps, lowest, names, [], []
        for step in steps:
            inputs, tensors, note = step.forward(inputs)
            saved += tensors
            ctx.counts.append(len(tensors))
            ctx.notes.append(note)
        ctx.save_for_backward(*saved)
        return inputs

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        saved, upstream_gradient, gradients = list(ctx.saved_tensors), upstream[0].clone(), Tree()
        for position in range(len(ctx.steps) - 1, ctx.lowest - 1, -1):
            step_saved = tuple(saved[len(saved) - ctx.counts[position] :])
            del saved[len(saved) - ctx.counts[position] :]
            upstream_gradient, step_gradients = ctx.steps[position].backward(
                upstream_gradient, step_saved, ctx.notes[position], further=position > ctx.lowest
            )
            gradients |= step_gradients
        return None, None, None, None, *(gradients[name] for name in ctx.names)
