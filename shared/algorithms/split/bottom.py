"""The client part of a split network on a device: all its trainable numbers as one vector, and its mask.

Only here is it known how the part is stored and computed: dense, with zeros where it is pruned, which takes no less
time. `tests/benchmarks/savings.py` measures what else there is: convolutions as sparse products are slower at every
sparsity up to 0.9, and of the channels hardly one in a hundred can go without any difference at 0.7, none at 0.35.

Zhang, Ni, Wang. Federated Split Learning with Model Pruning and Gradient Quantization in Wireless Networks; see
`shared.algorithms.split.fedsl`. Why weights alone are pruned: Li et al., Pruning Filters for Efficient ConvNets, ICLR 2017,
https://arxiv.org/abs/1608.08710. To keep few activations and compute the others again: Chen et al., Training Deep Nets
with Sublinear Memory Cost, 2016, https://arxiv.org/abs/1604.06174.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shared.algorithms.split.settings import MATRIX
from shared.errors import TaskFailed
from shared.models.base import Model
from shared.models.mode import in_mode
from shared.tensors.pruning import Channels
from shared.tensors.tree import Tree

PRUNED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Whose weights are pruned; biases and what normalises are not."""


class Bottom:
    """A device's own copy of the layers below the cut; it lives for one session.

    Attributes:
        vector: Every trainable number, of shape (N,): the weights that can be pruned, n of them, before the others.
        gradient: Of the same shape; of the batch that came last.
        layers: Of the weights that can be pruned, layer by layer: output channels, and weights of each.
        count: n.
    """

    def __init__(self, model: Model, cut: int, tree: Tree, *, recompute: bool = False) -> None:
        """Copy the leaves.

        Args:
            model: The whole network, without storage.
            cut: Where it is cut.
            tree: The leaves below.
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
        self._leaves = {name: part.requires_grad_() for name, part in self._parts(self.vector, names, tree).items()}
        for name, part in self._parts(self.gradient, names, tree).items():
            self._leaves[name].grad = part  # what comes is added in place, leaf by leaf, and never held twice
        self._others = {name: leaf.clone() for name, leaf in tree.items() if name not in trainable}
        self._pieces = _pieces(network) if recompute else None
        self._given: list[tuple[Tensor, Tensor]] = []

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
        self._given = []  # what is left of a batch that went on without this device
        for piece in self._pieces:
            given, changes = inputs, inputs._version  # noqa: SLF001 - nothing else of torch tells of changes in place
            self._given.append((given, torch.default_generator.get_state()))
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
            _back(features, upstream, self._leaves.values())
            return
        buffers = {name: leaf.clone() for name, leaf in self._others.items()}
        drawn, flow = torch.default_generator.get_state(), [upstream]
        for piece in reversed(self._pieces):
            given, drawing = self._given.pop()
            given = given.detach().requires_grad_(bool(self._given))
            leaves = [self._leaves[name] for name in piece.state_dict() if name in self._leaves]
            torch.default_generator.set_state(drawing)
            _back(self._run(piece, given, buffers), flow.pop(), [*leaves, given] if self._given else leaves)
            flow += [] if given.grad is None else [given.grad]
        torch.default_generator.set_state(drawn)

    def _run(self, layers: nn.Sequential, inputs: Tensor, buffers: Tree) -> Tensor:
        names = layers.state_dict().keys()
        leaves = {name: leaf for name, leaf in {**self._leaves, **buffers}.items() if name in names}
        with in_mode(self._whole, train=True):
            outputs: Tensor = functional_call(layers, leaves, (inputs,))
        return outputs

    def keep(self, buffers: Tree) -> None:
        """Take over what `forward` made of the buffers: its batch counts."""
        self._others = buffers

    def tree(self) -> Tree:
        """Return all leaves, views of the vector, in the order of those it was made of."""
        leaves = {name: leaf.detach() for name, leaf in self._leaves.items()} | self._others
        return {name: leaves[name] for name in self._keys}

    def coverage(self, mask: Tensor) -> Tree:
        """Return the mask, boolean of shape (n,), in the shapes of the weights that it is of."""
        parts = mask.split([channels * each for channels, each in self.layers])
        shaped = zip(self._weights, parts, strict=True)
        return {name: part.view(self._leaves[name].shape) for name, part in shaped}


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
