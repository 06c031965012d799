"""Client part of a split network on a device: all trainable numbers as one vector, and its pruning mask.

This module alone knows how the part is stored and computed: dense, with zeros where it is pruned, which takes no less
time. `tests/benchmarks/savings.py` measures the alternatives: convolutions as sparse products are slower at every
sparsity up to 0.9, and of the channels hardly one in a hundred can be removed without any difference at 0.7, none at
0.35.

Zhang, Ni, Wang. Federated Split Learning with Model Pruning and Gradient Quantization in Wireless Networks; see
`fedsl`. Why weights alone are pruned: Li et al., Pruning Filters for Efficient ConvNets, ICLR 2017,
https://arxiv.org/abs/1608.08710. Recomputing activations to save memory: Chen et al., Training Deep Nets with
Sublinear Memory Cost, 2016, https://arxiv.org/abs/1604.06174.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shared.algorithms.split.settings import MATRIX, FedslSettings, first_step, total_steps
from shared.errors import TaskFailed
from shared.models.base import Model
from shared.models.evaluate import in_mode
from shared.protocol.messages import Assignment
from shared.tensors import bits
from shared.tensors.counts import floor_share
from shared.tensors.placement import generator_states, set_generator_states
from shared.tensors.pruning import IMPORTANCE, Channels, apply_mask, max_prunable, select_kept, sparsity
from shared.tensors.tree import State, Tree

PRUNED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Whose weights are pruned; biases and what normalises are not."""


class Bottom:
    """A device's own copy of the layers below the cut; it lives for one session.

    Attributes:
        vector: Every trainable number, of shape (N,): the weights that can be pruned, n of them, before the others.
        gradient: Of the same shape; of the batch that came last.
        layers: Of the weights that can be pruned, layer by layer: output channels, and weights of each.
        leaves: Views of `vector` in the shapes of the network's leaves, by name, with views of `gradient` as theirs.
        given: What each part of the layers was given in the last forward pass, and the generators' states then; empty
            where activations are kept.
    """

    def __init__(self, model: Model, cut: int, tree: Tree, *, recompute: bool = False) -> None:
        """Copy the leaves.

        Args:
            model: The whole network, without storage.
            cut: Where it is cut.
            recompute: Whether a batch keeps no more than what each part of the layers is given, a part beginning with
                each layer that multiplies; all else is computed again on the way back. Features, gradients and buffers
                are the same to the bit.
        """
        self._whole, self._keys = model.layers, tuple(tree)
        self._network = network = model.below(cut)
        trainable = {name: leaf.shape for name, leaf in network.named_parameters() if leaf.requires_grad}
        weights = [
            f"{name}.weight"
            for name, layer in network.named_modules()
            if isinstance(layer, PRUNED) and f"{name}.weight" in trainable
        ]
        names = [*weights, *(name for name in trainable if name not in set(weights))]
        self.layers: list[Channels] = [(len(tree[name]), tree[name][0].numel()) for name in weights]
        self.count = sum(tree[name].numel() for name in weights)
        self.vector = torch.cat([tree[name].flatten() for name in names] or [torch.empty(0)])
        self.gradient = torch.zeros_like(self.vector)
        self._weights = tuple(weights)
        self.leaves = {name: part.requires_grad_() for name, part in self._parts(self.vector, names, tree).items()}
        for name, part in self._parts(self.gradient, names, tree).items():
            self.leaves[name].grad = part  # what comes is added in place, leaf by leaf, and never held twice
        self._others = {name: leaf.clone() for name, leaf in tree.items() if name not in trainable}
        self._pieces = _pieces(network) if recompute else None
        self.given: list[tuple[Tensor, list[Tensor]]] = []

    @staticmethod
    def _parts(vector: Tensor, names: list[str], like: Tree) -> Tree:
        """Return views of the vector in the shapes of the leaves."""
        parts = vector.split([like[name].numel() for name in names])
        return {name: part.view(like[name].shape).detach() for name, part in zip(names, parts, strict=True)}

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tree]:
        """Return the features of a batch, and the buffers as they are after it; `keep` makes these the part's own.

        Raises:
            TaskFailed: A layer changes in place what would be needed to compute it again.
        """
        buffers = {name: leaf.clone() for name, leaf in self._others.items()}
        if self._pieces is None:
            return self._run(self._network, inputs, buffers), buffers
        self.given = []  # what is left of a batch that went on without this device
        for piece in self._pieces:
            given, changes = inputs, inputs._version  # noqa: SLF001 - nothing else of torch tells of changes in place
            self.given.append((given, generator_states()))
            with torch.no_grad():
                inputs = self._run(piece, given, buffers)
            if given._version > changes:  # noqa: SLF001
                name, _ = next(piece.named_children())
                raise TaskFailed(f"layer {name} changes in place what it is given: set the option `recompute` to false")
        return inputs, buffers

    def backward(self, features: Tensor, upstream: Tensor) -> None:
        """Set `gradient`, given that of the features, of their shape; of the batch that `forward` had last."""
        self.gradient.zero_()
        if self._pieces is None:
            _back(features, upstream, self.leaves.values())
            return
        buffers = {name: leaf.clone() for name, leaf in self._others.items()}
        drawn, flow = generator_states(), [upstream]
        for piece in reversed(self._pieces):
            given, drawing = self.given.pop()
            given = given.detach().requires_grad_(bool(self.given))
            leaves = [self.leaves[name] for name in piece.state_dict() if name in self.leaves]
            set_generator_states(drawing)
            _back(self._run(piece, given, buffers), flow.pop(), [*leaves, given] if self.given else leaves)
            flow += [] if given.grad is None else [given.grad]
        set_generator_states(drawn)

    def _run(self, layers: nn.Sequential, inputs: Tensor, buffers: Tree) -> Tensor:
        names = layers.state_dict().keys()
        leaves = {name: leaf for name, leaf in {**self.leaves, **buffers}.items() if name in names}
        with in_mode(self._whole, train=True):
            outputs: Tensor = functional_call(layers, leaves, (inputs,))
        return outputs

    def keep(self, buffers: Tree) -> None:
        """Take over what `forward` made of the buffers: its batch counts."""
        self._others = buffers

    def tree(self) -> Tree:
        """Return all leaves, views of the vector, in the order of those it was made of."""
        leaves = {name: leaf.detach() for name, leaf in self.leaves.items()} | self._others
        return {name: leaves[name] for name in self._keys}

    def coverage(self, mask: Tensor) -> Tree:
        """Return the mask, boolean of shape (n,), in the shapes of the weights that it is of."""
        parts = mask.split([channels * each for channels, each in self.layers])
        shaped = zip(self._weights, parts, strict=True)
        return {name: part.view(self.leaves[name].shape) for name, part in shaped}


def _back(outputs: Tensor, upstream: Tensor, wanted: Collection[Tensor]) -> None:
    """Add to the gradients of some leaves, given that of the outputs, of their shape.

    Not by `torch.autograd.backward(outputs, upstream)`: to compare two shapes it imports an algebra of 50 MB.
    """
    if wanted:
        product = torch.dot(outputs.flatten(), upstream.flatten())
        del outputs, upstream  # as large as what the way back frees one by one
        torch.autograd.backward(product, inputs=list(wanted))


def _pieces(network: nn.Sequential) -> list[nn.Sequential]:
    """Return the layers in pieces, each of which begins with one that multiplies, but perhaps for the first."""
    layers = list(network.named_children())
    starts = [
        place
        for place, (_, layer) in enumerate(layers)
        if not place or any(leaf.ndim >= MATRIX for leaf in layer.parameters())
    ]
    ends = [*starts[1:], len(layers)]
    return [nn.Sequential(OrderedDict(layers[start:end])) for start, end in zip(starts, ends, strict=True)]


class Mask:
    """Which numbers of a device's client part are active; it lives for one session.

    Attributes:
        active: Boolean of shape (N,), as `Bottom.vector`; what cannot be pruned always is.
        norm_ratio: The greatest |w - w~|^2 / |w|^2 of a pruning, which the paper's assumption 5 bounds by rho_t.
    """

    def __init__(self, settings: FedslSettings, state: State, bottom: Bottom, assignment: Assignment) -> None:
        self._settings, self._rounds = settings, total_steps(assignment) // settings.steps_per_round
        self._zeros: int | None = None
        self.norm_ratio = 0.0
        self.active = torch.ones(len(bottom.vector), dtype=torch.bool, device=bottom.vector.device)
        if (packed := state.tree.get("mask")) is not None:
            self.active[: bottom.count] = torch.from_numpy(
                bits.unpack(packed.numpy(force=True), bottom.count, 1)
            ).bool()
        elif first_step(assignment):  # the state was lost, or the device is new: what all others have pruned stays so
            self.active[: bottom.count] = bottom.vector[: bottom.count] != 0

    def packed(self, count: int) -> Tensor:
        """Return the mask of the n weights that can be pruned, as a bitmap of ceil(n / 8) bytes."""
        return torch.from_numpy(bits.pack(self.active[:count].numpy(force=True), 1))

    def apply(self, bottom: Bottom, step: int) -> None:
        """Mask weights and gradient at a step of the run, after a new ranking if the schedule asks for more zeros."""
        weights, gradient = bottom.vector[: bottom.count], bottom.gradient[: bottom.count]
        active, fresh = self.active[: bottom.count], self._zeros is None
        zeros = _zeros(weights) if self._zeros is None else self._zeros
        now = sparsity(-(-step // self._settings.steps_per_round), self._rounds, self._settings.sparsity)
        wanted = min(floor_share(now, bottom.count), max_prunable(bottom.layers))
        if zeros < wanted:
            importance = IMPORTANCE[self._settings.importance](weights, gradient)
            active.copy_(select_kept(importance, weights, wanted, bottom.layers))
        if zeros < wanted or fresh:
            before = torch.dot(weights, weights).item()
            apply_mask(weights, active)
            self._zeros = _zeros(weights)
            if before:
                self.norm_ratio = max(self.norm_ratio, 1 - torch.dot(weights, weights).item() / before)
        apply_mask(gradient, active)


def _zeros(weights: Tensor) -> int:
    return len(weights) - int(torch.count_nonzero(weights))
