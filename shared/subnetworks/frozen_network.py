"""Frozen network: train the active neurons at the cost of the trained part alone.

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
from shared.subnetworks.chain import named_layers
from shared.subnetworks.frozen_activations import Flat, Other, Rectified, build_other, build_pooling
from shared.subnetworks.frozen_layers import Norm, Step, Weighty, convolution_geometry
from shared.subnetworks.frozen_payoff import is_worth_freezing
from shared.subnetworks.neurons import Active, Index, extract, merge, read_chain
from shared.tensors.tree import Tree

_WEIGHTY = (nn.Linear, nn.Conv1d, nn.Conv2d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
_IMAGES = 4
"""Axes of a weight whose input channels shall lie side by side in memory."""


@dataclass(frozen=True)
class Trainable:
    """A network of which the active part trains; call it on inputs, and send the loss backward.

    Attributes:
        lowest: Place of the first of them with something to train: the error signal ends there.
        whole: All of its leaves, active neurons first.
        weights: What to descend: leaves by name, views of the active part of `whole`.
        index: Which rows and columns are active, in the order that the network has.
        places: Where the rows and columns of `whole` stand in that order.
        keys: Names of all leaves of the network, in its order.
        still: What the rest is in any case: counts of batches, running statistics of frozen neurons.
        plain: The network itself, made of `whole`, where torch's own backward is faster than the steps'.
    """

    steps: Sequence[Step]
    lowest: int
    whole: Tree
    weights: Tree
    index: Index
    places: Index
    keys: tuple[str, ...]
    still: Tree
    plain: nn.Sequential | None = None

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return outputs, by statistics of the batch where layers have a training mode."""
        own = self.steps, self.lowest, tuple(self.weights), inputs, *self.weights.values()
        outputs: Tensor = self.plain(inputs) if self.plain else _Pass.apply(*own)  # type: ignore[no-untyped-call]
        return outputs

    def part(self) -> Tree:
        """Return copies of the active part, running statistics too: what is sent."""
        return {key: _first(leaf, *self.index[key]).clone() for key, leaf in self.whole.items()}

    def tree(self) -> Tree:
        """Return all parameters and buffers as the network has them; all but the active part keep their bits."""
        found = extract(self.whole, {key: _inverse(*self.places[key]) for key in self.whole})
        fixed = {key: self.index[key] for key in self.still if key in self.index}
        found |= merge(self.still, extract(found, fixed), fixed)
        return {key: _own(found[key], self.whole.get(key)) for key in self.keys}


def freeze(
    layers: nn.Sequential,
    tree: Tree,
    active: Active,
    batch: Sequence[int] = (),
    *,
    detached: bool = False,
    drifting: bool = False,
) -> Trainable:
    """Make the active neurons of a network trainable.

    Args:
        layers: The network; only its shape is read, it needs no storage.
        tree: Its parameters and buffers; they are copied.
        active: The neurons to train, by hidden layer.
        batch: Shape of a step's inputs. If it is given, a network too small for this to pay makes all its gradients
            in torch's own way, and uses those of its active part.
        detached: Whether the error signal ends at frozen neurons. It saves time and memory, and changes the gradient.
        drifting: Whether running statistics of frozen neurons follow what they see, or stay as they are.

    Raises:
        ConfigError: The network is no chain of layers whose neurons can be told apart.
    """
    index = read_chain(layers).index(active)
    places = {key: _places(tree[key], *index[key]) for key in index}
    whole = {key: _laid(extract(tree, {key: places[key]})[key], tree[key]) for key in places}
    names = {key for key, _ in layers.named_parameters()}
    weights = {key: _first(leaf, *index[key]).detach() for key, leaf in whole.items() if key in names}
    still = {key: leaf.clone() for key, leaf in tree.items() if key not in index or (key not in names and not drifting)}
    steps = _steps(layers, whole, index, detached=detached)
    lowest = next(place for place, step in enumerate(steps) if isinstance(step, Weighty | Norm))
    for leaf in weights.values():
        leaf.requires_grad_(True)
    plain = (
        None if not batch or detached or is_worth_freezing(layers, index, batch) else _plainly(layers, whole, weights)
    )
    return Trainable(steps, lowest, whole, weights, index, places, tuple(tree), still, plain)


def _plainly(layers: nn.Sequential, whole: Tree, weights: Tree) -> nn.Sequential:
    """Return the network itself, in the memory of `whole`; its backward gives the weights their part of gradients."""
    found = copy.deepcopy(layers).train()
    found.load_state_dict(whole, strict=False, assign=True)  # all but counts of batches, which nobody reads
    for name, leaf in found.named_parameters():
        leaf.register_post_accumulate_grad_hook(partial(_hand_on, weights[name]))
    return found


def _hand_on(weight: Tensor, leaf: Tensor) -> None:
    """Leave the active part of a gradient to those weights, in memory of its own."""
    assert leaf.grad is not None
    part = leaf.grad[tuple(slice(size) for size in weight.shape)]
    weight.grad, leaf.grad = part.clone() if weight.grad is None else weight.grad + part, None


def _steps(layers: nn.Sequential, whole: Tree, index: Index, *, detached: bool) -> list[Step]:
    """Build the chain; a ReLU goes behind the pooling layer that follows it, where it has less to do."""
    named = [(name, layer) for name, layer in named_layers(layers) if not isinstance(layer, nn.Identity)]
    for place, (_, layer) in enumerate(named[1:], 1):
        if type(layer) is nn.MaxPool2d and type(named[place - 1][1]) is nn.ReLU:
            named[place - 1], named[place] = named[place], named[place - 1]
    steps: list[Step] = []
    rows: int | None = None
    for name, layer in named:
        if type(layer) in _WEIGHTY:
            below = [type(step) for step in steps if isinstance(step, Weighty | Norm)]
            narrow = below[:1] == [Weighty] and below.count(Weighty) == 1
            step = _weighty(name, layer, whole, index, detached=detached, narrow=narrow)
            steps.append(step)
            rows = step.rows if detached or not below else None  # the lowest layer passes no error signal on
        elif type(layer) in _NORMS:
            steps.append(_norm(name, layer, whole, index, narrow=rows is not None))
        else:
            steps.append(_plain(layer, rows, steps))
    return steps


def _weighty(name: str, layer: nn.Module, whole: Tree, index: Index, *, detached: bool, narrow: bool) -> Weighty:
    weight = whole[f"{name}.weight"]
    rows, columns = _first(weight, *index[f"{name}.weight"]).shape[:2]
    shape = convolution_geometry(layer) if isinstance(layer, nn.Conv1d | nn.Conv2d) else None
    return Weighty(name, weight, whole.get(f"{name}.bias"), rows, columns, detached, narrow, shape)


def _norm(name: str, layer: nn.Module, whole: Tree, index: Index, *, narrow: bool) -> Norm:
    assert isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d)
    if layer.momentum is None:
        raise ConfigError(f"model: layer {name} is a BatchNorm of all batches so far; give it a momentum")
    leaves = [whole.get(f"{name}.{kind}") for kind in ("weight", "bias", "running_mean", "running_var")]
    chosen = next((index[key][0] for key in index if key.startswith(f"{name}.")), None)
    rows = layer.num_features if chosen is None else len(chosen)
    return Norm(name, leaves[0], leaves[1], leaves[2], leaves[3], rows, narrow, layer.momentum, layer.eps)


def _plain(layer: nn.Module, rows: int | None, before: Sequence[Step]) -> Step:
    match layer:
        case nn.ReLU():
            return Rectified(rows, fresh=_fresh(before))
        case nn.MaxPool2d():
            return build_pooling(layer, rows)
        case nn.Flatten():
            return Flat(rows)
    return build_other(layer, rows)


def _fresh(before: Sequence[Step]) -> bool:
    """Tell whether nobody reads again what these layers give: it is not the input, nor kept for a backward."""
    return next((not isinstance(step, Other) for step in reversed(before) if not isinstance(step, Flat)), False)


def _places(leaf: Tensor, rows: Tensor | None, columns: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return all rows and columns of a leaf, active ones first."""
    return _order(leaf.shape[0], rows), None if columns is None else _order(leaf.shape[1], columns)


def _order(count: int, chosen: Tensor | None) -> Tensor | None:
    if chosen is None:
        return None
    others = torch.ones(count, dtype=torch.bool, device=chosen.device).index_fill_(0, chosen, False)
    return torch.cat([chosen, others.nonzero().flatten()])


def _inverse(rows: Tensor | None, columns: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    return None if rows is None else rows.argsort(), None if columns is None else columns.argsort()


def _first(leaf: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    """Return a view of as many first rows and columns as are active."""
    leaf = leaf if rows is None else leaf[: len(rows)]
    return leaf if columns is None else leaf[:, : len(columns)]


def _own(leaf: Tensor, other: Tensor | None) -> Tensor:
    return leaf.clone() if leaf is other else leaf


def _laid(leaf: Tensor, source: Tensor) -> Tensor:
    """Return a leaf of its own, as convolutions read it: of one channel too, its strides say how outputs shall lie."""
    if leaf.ndim == _IMAGES:
        return leaf.clone(memory_format=torch.channels_last)
    return leaf.clone() if leaf is source else leaf


class _Pass(torch.autograd.Function):
    """The whole chain as one step of autograd: what it keeps is what its layers say."""

    @staticmethod
    def forward(
        ctx: Any, steps: Sequence[Step], lowest: int, names: tuple[str, ...], inputs: Tensor, *_leaves: Tensor
    ) -> Tensor:
        kept: list[Tensor] = []
        ctx.steps, ctx.lowest, ctx.names, ctx.counts, ctx.notes = steps, lowest, names, [], []
        for step in steps:
            inputs, tensors, note = step.forward(inputs)
            kept += tensors
            ctx.counts.append(len(tensors))
            ctx.notes.append(note)
        ctx.save_for_backward(*kept)
        return inputs

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        kept, flowing, grown = list(ctx.saved_tensors), upstream[0].clone(), Tree()
        for place in range(len(ctx.steps) - 1, ctx.lowest - 1, -1):
            own = tuple(kept[len(kept) - ctx.counts[place] :])
            del kept[len(kept) - ctx.counts[place] :]
            flowing, found = ctx.steps[place].backward(flowing, own, ctx.notes[place], further=place > ctx.lowest)
            grown |= found
        return None, None, None, None, *(grown[name] for name in ctx.names)
