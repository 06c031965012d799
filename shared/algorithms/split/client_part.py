"""Client part of a split network on a device, and its pruning mask.

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

from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shared.algorithms.split.settings import MATRIX, FedslSettings, first_step, total_steps
from shared.errors import TaskFailed
from shared.models.base import Model
from shared.models.chain import named_layers, parts_of
from shared.models.evaluate import training_mode
from shared.protocol.messages import Assignment
from shared.tensors import bits
from shared.tensors.counts import floor_share
from shared.tensors.generators import generator_states, set_generator_states
from shared.tensors.pruning import IMPORTANCE, Channels, apply_mask, max_prunable, select_mask, sparsity
from shared.tensors.tree import State, Tree

PRUNED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers whose weights are pruned; biases and normalisation layers are not."""


class Bottom:
    """A device's private copy of the layers below the cut, for one session.

    Attributes:
        vector: All trainable numbers, of shape (N,): the n prunable weights first.
        gradient: Gradient of the last batch, of the same shape.
        layers: (output channels, weights per channel) of each prunable weight.
        leaves: Views of `vector` in the shapes of the network's leaves, by name; their gradients are views of
            `gradient`.
        piece_inputs: Input and generator states of each piece of the layers in the last forward pass; empty where
            activations are stored.
    """

    def __init__(self, model: Model, cut: int, tree: Tree, *, recompute: bool = False) -> None:
        """Copy the leaves.

        Args:
            model: The whole network, without storage.
            recompute: Whether a batch stores only the inputs of the pieces of the layers, each of which begins with a
                layer that multiplies; all other activations are recomputed in the backward pass. Features, gradients
                and buffers are the same bit for bit.
        """
        self._whole, self._keys = model.chain, tuple(tree)
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
            self.leaves[name].grad = part  # gradients are added in place, leaf by leaf, without a second copy
        self._others = {name: leaf.clone() for name, leaf in tree.items() if name not in trainable}
        self._pieces = _split_pieces(network) if recompute else None
        self.piece_inputs: list[tuple[Tensor, list[Tensor]]] = []

    @staticmethod
    def _parts(vector: Tensor, names: list[str], like: Tree) -> Tree:
        parts = vector.split([like[name].numel() for name in names])
        return {name: part.view(like[name].shape).detach() for name, part in zip(names, parts, strict=True)}

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tree]:
        """Return the features of a batch, and the updated buffers, which `keep` stores.

        Raises:
            TaskFailed: A layer changes its input in place, so that it cannot be recomputed.
        """
        buffers = {name: leaf.clone() for name, leaf in self._others.items()}
        if self._pieces is None:
            return self._run(self._network, inputs, buffers), buffers
        self.piece_inputs = []  # inputs of a batch whose barrier passed without this device
        for piece in self._pieces:
            piece_input, changes = inputs, inputs._version  # noqa: SLF001 - torch's only way to detect changes in place
            self.piece_inputs.append((piece_input, generator_states()))
            with torch.no_grad():
                inputs = self._run(piece, piece_input, buffers)
            if piece_input._version > changes:  # noqa: SLF001
                name, _ = named_layers(piece)[0]
                raise TaskFailed(f"layer {name} changes its input in place: set the option `recompute` to false")
        return inputs, buffers

    def backward(self, features: Tensor, upstream: Tensor) -> None:
        """Set `gradient` from the gradient of the features, of the batch that `forward` had last."""
        self.gradient.zero_()
        if self._pieces is None:
            _backpropagate(features, upstream, self.leaves.values())
            return
        buffers = {name: leaf.clone() for name, leaf in self._others.items()}
        states, flow = generator_states(), [upstream]
        for piece in reversed(self._pieces):
            piece_input, piece_states = self.piece_inputs.pop()
            piece_input = piece_input.detach().requires_grad_(bool(self.piece_inputs))
            leaves = [self.leaves[name] for name in piece.state_dict() if name in self.leaves]
            set_generator_states(piece_states)
            _backpropagate(
                self._run(piece, piece_input, buffers),
                flow.pop(),
                [*leaves, piece_input] if self.piece_inputs else leaves,
            )
            flow += [] if piece_input.grad is None else [piece_input.grad]
        set_generator_states(states)

    def _run(self, layers: nn.Sequential, inputs: Tensor, buffers: Tree) -> Tensor:
        names = layers.state_dict().keys()
        leaves = {name: leaf for name, leaf in {**self.leaves, **buffers}.items() if name in names}
        with training_mode(self._whole, train=True):
            outputs: Tensor = functional_call(layers, leaves, (inputs,))
        return outputs

    def keep(self, buffers: Tree) -> None:
        """Store the buffers of `forward`: its batch counts."""
        self._others = buffers

    def tree(self) -> Tree:
        """Return all leaves, views of the vector, in their original order."""
        leaves = {name: leaf.detach() for name, leaf in self.leaves.items()} | self._others
        return {name: leaves[name] for name in self._keys}

    def coverage(self, mask: Tensor) -> Tree:
        """Return the mask, boolean of shape (n,), in the shapes of the prunable weights."""
        parts = mask.split([channels * each for channels, each in self.layers])
        shaped = zip(self._weights, parts, strict=True)
        return {name: part.view(self.leaves[name].shape) for name, part in shaped}


def _backpropagate(outputs: Tensor, upstream: Tensor, leaves: Collection[Tensor]) -> None:
    """Add to the gradients of some leaves, given the gradient of the outputs, of their shape.

    Not `torch.autograd.backward(outputs, upstream)`: to compare two shapes it imports a symbolic algebra package of 50
    MB.
    """
    if leaves:
        product = torch.dot(outputs.flatten(), upstream.flatten())
        del outputs, upstream  # as large as the activations that the backward pass frees one by one
        torch.autograd.backward(product, inputs=list(leaves))


def _split_pieces(network: nn.Sequential) -> list[nn.Sequential]:
    """Split the layers into pieces, each of which begins with a layer that multiplies, except perhaps the first."""
    starts = [
        place
        for place, layer in enumerate(network)
        if not place or any(leaf.ndim >= MATRIX for part in parts_of(layer) for leaf in part.parameters(recurse=False))
    ]
    ends = [*starts[1:], len(network)]
    pieces = [network[start:end] for start, end in zip(starts, ends, strict=True)]
    return [piece for piece in pieces if isinstance(piece, nn.Sequential)]


class Mask:
    """Pruning mask of a device's client part, for one session.

    Attributes:
        active: Boolean of shape (N,), as `Bottom.vector`; always True for numbers that cannot be pruned.
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
        elif first_step(assignment):  # new device or lost state: adopt the zeros of the average
            self.active[: bottom.count] = bottom.vector[: bottom.count] != 0

    def pack_bits(self, count: int) -> Tensor:
        """Return the mask of the n prunable weights, as a bitmap of ceil(n / 8) bytes."""
        return torch.from_numpy(bits.pack(self.active[:count].numpy(force=True), 1))

    def apply(self, bottom: Bottom, step: int) -> None:
        """Mask weights and gradient at a step of the run, after a new ranking if the schedule requires more zeros."""
        weights, gradient = bottom.vector[: bottom.count], bottom.gradient[: bottom.count]
        active, fresh = self.active[: bottom.count], self._zeros is None
        zeros = _count_zeros(weights) if self._zeros is None else self._zeros
        now = sparsity(-(-step // self._settings.steps_per_round), self._rounds, self._settings.sparsity)
        target = min(floor_share(now, bottom.count), max_prunable(bottom.layers))
        if zeros < target:
            importance = IMPORTANCE[self._settings.importance](weights, gradient)
            active.copy_(select_mask(importance, weights, target, bottom.layers))
        if zeros < target or fresh:
            before = torch.dot(weights, weights).item()
            apply_mask(weights, active)
            self._zeros = _count_zeros(weights)
            if before:
                self.norm_ratio = max(self.norm_ratio, 1 - torch.dot(weights, weights).item() / before)
        apply_mask(gradient, active)


def _count_zeros(weights: Tensor) -> int:
    return len(weights) - int(torch.count_nonzero(weights))
