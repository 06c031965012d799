"""FjORD's device half: nested networks of several widths that share one set of parameters.

Horvath et al., NeurIPS 2021, https://arxiv.org/abs/2102.13451; see `fjord`. A batch costs as much as the network of
the width drawn for it: it is computed with slices of the parameters, in a network of that size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from shared.algorithms.base import Batches
from shared.algorithms.fedavg import require_finite_loss
from shared.algorithms.subnetwork.fjord_widths import Widths, is_statistic
from shared.algorithms.subnetwork.server_half import (
    read_download,
)
from shared.errors import WireError
from shared.models.base import Model
from shared.protocol.messages import Assignment
from shared.subnetworks.neurons import Index, build_narrowed, first_neurons, read_chain
from shared.tensors.sgd import descend
from shared.tensors.tree import Tree, check_like

PICTURE = 4
"""Dimensions of a weight that has kernels of two."""


@dataclass(frozen=True)
class Nested:
    """Parameters of one width, and the networks that are made of them.

    Attributes:
        leaves: As they came: parameters of the widest that is here, statistics of all that are here.
        layers: Network by network, up to the widest.
        indices: Of each, which rows and columns it has; these are always the first.
    """

    every: Widths
    leaves: Tree
    layers: tuple[nn.Sequential, ...]
    indices: tuple[Index, ...]

    @classmethod
    def received(cls, model: Model, down: Tree, every: Widths, own: int) -> Nested:
        """Read what came for a device of a width.

        Raises:
            WireError: It is not that.
        """
        layout = read_chain(model.layers)
        active = [first_neurons(layout.hidden, share) for share in every.shares[: own + 1]]
        indices = tuple(layout.index(one) for one in active)
        names = [key for key in layout.leaves if is_statistic(key)]
        wanted = {every.named(key, width): (key, width) for width in range(own + 1) for key in names}
        if {key for key in down if is_statistic(key)} != wanted.keys():
            raise WireError("statistics came that are not those of the device's widths", reason="unknown-tensor")
        _, _, values = read_download(model, every.cut(down, own))
        like = {name: _corner(values[key], *indices[width][key]) for name, (key, width) in wanted.items()}
        check_like({name: down[name] for name in wanted}, like)
        leaves = {key: _laid(values[key]).requires_grad_() for key in layout.leaves if not is_statistic(key)}
        leaves |= {name: down[name].clone() for name in wanted}
        return cls(every, leaves, tuple(build_narrowed(model.layers, one) for one in active), indices)

    @property
    def own(self) -> int:
        """Number of the widest that is here."""
        return len(self.layers) - 1

    def part(self, width: int) -> Tree:
        """Return what a network of one width is made of: views."""
        index, tree = self.indices[width], self.every.cut(self.leaves, width)
        return {key: _corner(leaf, *index[key]) for key, leaf in tree.items()}

    def __call__(self, width: int, inputs: Tensor) -> Tensor:
        """Return the outputs (B, classes) of one network in training mode."""
        outputs: Tensor = functional_call(self.layers[width], self.part(width), (inputs,))
        return outputs

    def train(self, batches: Batches, told: Assignment, *, distil: bool) -> float | None:
        """Train a width drawn for each batch; return the mean loss, None without a batch.

        With `distil`, that of the widest, which each batch trains as well.

        Args:
            distil: Whether narrow networks learn from the widest.
        """
        generator = torch.Generator().manual_seed(told.seed)
        weights = [(key, leaf) for key, leaf in self.leaves.items() if leaf.requires_grad]
        momenta, seen, loss_sum = Tree(), 0, 0.0
        for step, (inputs, labels) in enumerate(batches, start=1):
            width = int(torch.randint(len(self.layers), (), generator=generator))
            targets, said = labels, None
            if distil:
                outputs = self(self.own, inputs)
                said = functional.cross_entropy(outputs, labels)
                said.backward()
                targets = outputs.detach().softmax(1)
            loss = functional.cross_entropy(self(width, inputs), targets)
            loss.backward()
            descend(weights, momenta, told.hyper)
            seen += len(labels)
            loss_sum += require_finite_loss((loss if said is None else said).item(), step) * len(labels)
        return loss_sum / seen if seen else None


def _laid(leaf: Tensor) -> Tensor:
    """Return a copy as convolutions read it: a pixel's channels side by side."""
    return leaf.clone(memory_format=torch.channels_last if leaf.ndim == PICTURE else torch.contiguous_format)


def _corner(leaf: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    """Return the first rows and columns of a leaf, as many as are given."""
    leaf = leaf if rows is None else leaf[: len(rows)]
    return leaf if columns is None else leaf[:, : len(columns)]
