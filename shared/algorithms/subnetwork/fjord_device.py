"""Device half of FjORD: nested networks that share one set of parameters.

Horvath et al., NeurIPS 2021, https://arxiv.org/abs/2102.13451; see `fjord`. A batch costs as much as the network of
the width drawn for it: it is computed with slices of the parameters, in a network of that size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shared.algorithms.base import Batches
from shared.algorithms.fedavg import require_finite_loss
from shared.algorithms.subnetwork.fjord_widths import Widths, is_batchnorm_statistic
from shared.algorithms.subnetwork.server_half import read_download
from shared.errors import WireError
from shared.models.base import Model
from shared.objectives.training import TrainingObjective
from shared.protocol.messages import Assignment
from shared.subnetworks.narrow import build_narrow_network
from shared.subnetworks.neurons import Index, first_neurons, read_chain
from shared.tensors.training_step import descend
from shared.tensors.tree import Tree, check_like

PICTURE = 4
"""Dimensions of a weight of a 2-D convolution."""


@dataclass(frozen=True)
class Nested:
    """Parameters of a device's width, and the nested networks that use them.

    Attributes:
        every: All widths of the algorithm.
        leaves: Parameters of the widest network on the device, and statistics of every width on it.
        layers: Networks from the narrowest to the widest on the device.
        indices: Rows and columns of each network; always the first ones.
    """

    every: Widths
    leaves: Tree
    layers: tuple[nn.Sequential, ...]
    indices: tuple[Index, ...]
    objective: TrainingObjective

    @classmethod
    def from_download(cls, model: Model, down: Tree, every: Widths, width: int) -> Nested:
        """Build the networks from the download for a device of width `width`.

        Raises:
            WireError: The download does not match.
        """
        layout = read_chain(model.chain)
        active = [first_neurons(layout.hidden, share) for share in every.shares[: width + 1]]
        indices = tuple(layout.index(neurons) for neurons in active)
        names = [key for key in layout.leaves if is_batchnorm_statistic(key)]
        statistics = {every.statistic_name(key, width): (key, width) for width in range(width + 1) for key in names}
        if {key for key in down if is_batchnorm_statistic(key)} != statistics.keys():
            raise WireError("received statistics do not match the device's widths", reason="unknown-tensor")
        _, _, values = read_download(model, every.cut(down, width))
        like = {name: _slice_first(values[key], *indices[width][key]) for name, (key, width) in statistics.items()}
        check_like({name: down[name] for name in statistics}, like)
        leaves = {
            key: _copy_layout(values[key]).requires_grad_() for key in layout.leaves if not is_batchnorm_statistic(key)
        }
        leaves |= {name: down[name].clone() for name in statistics}
        layers = tuple(build_narrow_network(model.chain, neurons) for neurons in active)
        return cls(every, leaves, layers, indices, model.objective)

    @property
    def widest(self) -> int:
        """Number of the widest network on the device."""
        return len(self.layers) - 1

    def part(self, width: int) -> Tree:
        """Return the leaves of the network of one width: views."""
        index, tree = self.indices[width], self.every.cut(self.leaves, width)
        return {key: _slice_first(leaf, *index[key]) for key, leaf in tree.items()}

    def __call__(self, width: int, inputs: Tensor) -> Tensor:
        """Return the outputs (B, classes) of one network in training mode."""
        outputs: Tensor = functional_call(self.layers[width], self.part(width), (inputs,))
        return outputs

    def train(self, batches: Batches, assignment: Assignment, *, distil: bool) -> float | None:
        """Train the network of a random width on each batch; return the mean loss, None without a batch.

        Args:
            distil: Whether each batch also trains the widest network, whose outputs are then the targets of the narrow
                one; the mean loss is that of the widest.
        """
        generator = torch.Generator().manual_seed(assignment.seed)
        weights = [(key, leaf) for key, leaf in self.leaves.items() if leaf.requires_grad]
        momenta, examples, loss_sum = Tree(), 0, 0.0
        for step, (inputs, labels) in enumerate(batches, start=1):
            width = int(torch.randint(len(self.layers), (), generator=generator))
            targets, widest_loss = labels, None
            if distil:
                outputs = self(self.widest, inputs)
                widest_loss = self.objective.loss(outputs, labels)
                widest_loss.backward()
                targets = self.objective.soft_targets(outputs.detach())
            loss = self.objective.loss(self(width, inputs), targets)
            loss.backward()
            descend(weights, momenta, assignment.hyper)
            examples += len(labels)
            loss_sum += require_finite_loss((loss if widest_loss is None else widest_loss).item(), step) * len(labels)
        return loss_sum / examples if examples else None


def _copy_layout(leaf: Tensor) -> Tensor:
    return leaf.clone(memory_format=torch.channels_last if leaf.ndim == PICTURE else torch.contiguous_format)


def _slice_first(leaf: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    leaf = leaf if rows is None else leaf[: len(rows)]
    return leaf if columns is None else leaf[:, : len(columns)]
