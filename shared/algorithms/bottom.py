"""The client part of a split network on a device: all its trainable numbers as one vector, and its mask.

Only here is it known how the part is stored and computed: dense, with zeros where it is pruned. A part that leaves out
dead channels, or multiplies sparse, would take this file's place.

Zhang, Ni, Wang. Federated Split Learning with Model Pruning and Gradient Quantization in Wireless Networks; see
`shared.algorithms.fedsl`. Why weights alone are pruned: Li et al., Pruning Filters for Efficient ConvNets, ICLR 2017,
https://arxiv.org/abs/1608.08710.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shared.algorithms.split import in_mode
from shared.models.base import Model
from shared.pruning import Channels
from shared.tree import Tree

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

    def __init__(self, model: Model, cut: int, tree: Tree) -> None:
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
        self._others = {name: leaf.clone() for name, leaf in tree.items() if name not in trainable}

    @staticmethod
    def _parts(vector: Tensor, names: list[str], like: Tree) -> Tree:
        """Return views of the vector in the shapes of the leaves."""
        parts = vector.split([like[name].numel() for name in names])
        return {name: part.view(like[name].shape).detach() for name, part in zip(names, parts, strict=True)}

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tree]:
        """Return the features of a batch, and the buffers as they are after it; `keep` makes these the part's own."""
        buffers = {name: leaf.clone() for name, leaf in self._others.items()}
        with in_mode(self._whole, train=True):
            return functional_call(self._network, {**self._leaves, **buffers}, (inputs,)), buffers

    def backward(self, features: Tensor, upstream: Tensor) -> None:
        """Set `gradient`, given that of the features, of their shape."""
        leaves = list(self._leaves.values())
        # Not `grad(features, leaves, upstream)`: to compare two shapes, that imports a library for algebra, 50 MB.
        product = torch.dot(features.flatten(), upstream.flatten())
        found = torch.autograd.grad(product, leaves, materialize_grads=True) if leaves else ()
        if found:
            torch.cat([leaf.flatten() for leaf in found], out=self.gradient)

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
