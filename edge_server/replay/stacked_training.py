"""Several networks of one shape as one: their parameters in stacks, their examples side by side.

Vectors lie as (K, features, B), and a linear layer of K devices is one product of stacks. Pictures lie as
(B, K x channels, height, width) with the channels last in memory, and a convolution of K devices is one convolution of
K groups. Whatever works on each number or each channel alone is left as it is.

`torch.func.vmap` of a convolution makes the same groups, but copies around each of them; see
tests/benchmarks/together.py for what it costs.

Train a cohort of same-shaped models at once: one step of all devices is one pass through a stack of networks.

What a device learns is what it would have learned alone, but for the order in which floats are summed: every device
has its own parameters, batches in the order of its own seed, momentum and loss. Only methods whose device half is
`LocalSgd` can be trained so.

How many devices share a pass follows from shapes alone, never from a clock: two replays must write the same journal.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from edge_server.plan.plan import Plan
from shared.algorithms import ALGORITHMS
from shared.algorithms.base import Algorithm, Batch, Batches, Result
from shared.algorithms.fedavg import Correction, LocalSgd
from shared.models.evaluate import build_skeleton
from shared.protocol.messages import Hyper
from shared.registry import build
from shared.tensors.sgd import descend
from shared.tensors.tree import Tree

ELEMENTWISE = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Identity)
CHANNELWISE = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)
PICTURE = 3
"""How many axes they have."""

ROOM_BYTES = 16 << 20
PARTS = 4
"""Into which a cohort is cut at least, so that several processes have work."""

NOBODY = -100
"""A label that `cross_entropy` leaves out, with its gradient."""


class Linear(nn.Module):
    """K linear layers, inputs of shape (K, features, B): of few outputs, such as classes, a product is faster so."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias  # in whose place `lay_in` puts stacks

    def forward(self, inputs: Tensor) -> Tensor:
        """Return outputs of shape (K, features, B)."""
        weights, bias = self.weight, self.bias
        return torch.bmm(weights, inputs) if bias is None else torch.baddbmm(bias[:, :, None], weights, inputs)


class Convolution(nn.Module):
    """K convolutions, inputs of shape (B, K x channels, height, width)."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self._groups = layer.groups
        self._how: dict[str, Any] = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation}

    def forward(self, inputs: Tensor) -> Tensor:
        """Return outputs of shape (B, K x channels, height, width)."""
        bias = None if self.bias is None else self.bias.flatten()
        groups = len(self.weight) * self._groups
        return functional.conv2d(inputs, self.weight.flatten(0, 1), bias, groups=groups, **self._how)


class Flatten(nn.Module):
    """Pictures of K devices become vectors: (B, K x channels, height, width) -> (K, features, B)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self._channels = channels

    def forward(self, inputs: Tensor) -> Tensor:
        """Return vectors of shape (K, features, B)."""
        count, channels, *sides = inputs.shape
        several = inputs.view(count, channels // self._channels, self._channels, *sides)
        return several.transpose(0, 1).flatten(2).mT


class SideBySide(nn.Module):
    """Pictures of K devices, (K, B, channels, height, width), as convolutions take them."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return pictures of shape (B, K x channels, height, width)."""
        return inputs.transpose(0, 1).flatten(1, 2).contiguous(memory_format=torch.channels_last)


class Vectors(nn.Module):
    """Examples of K devices, (K, B, ...), as linear layers take them."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return vectors of shape (K, features, B)."""
        return inputs.flatten(2).mT


def stack_networks(layers: nn.Module, example: torch.Size) -> nn.Sequential | None:
    """Return a network for the examples of several devices, its parameters named as the layers' own.

    It takes inputs of shape (K, B, ...) and returns outputs of shape (K, classes, B), once `lay_in` has given it
    parameters. None where there is a layer that cannot be done so: one with buffers or with chance in it, or one that
    this does not know.

    Args:
        layers: A chain that ends in vectors.
        example: Shape of one input.
    """
    if not isinstance(layers, nn.Sequential) or not len(layers) or _is_tied(layers):
        return None
    pictures = len(example) == PICTURE and type(layers[0]) is not nn.Flatten
    channels = example[0] if pictures else None
    chain: list[tuple[str, nn.Module]] = [("in", SideBySide() if pictures else Vectors())]
    for name, layer in _pooled_first(layers):
        if (several := _of_several(layer, channels)) is None:
            return None
        chain.append((name, several))
        if isinstance(layer, nn.Conv2d | nn.Flatten):
            channels = layer.out_channels if isinstance(layer, nn.Conv2d) else None
    return nn.Sequential(OrderedDict(chain)) if channels is None else None


def _is_tied(layers: nn.Sequential) -> bool:
    """Tell whether two layers share a parameter, or one stands still."""
    parameters = [leaf for _, leaf in layers.named_parameters(remove_duplicate=False)]
    return len({id(leaf) for leaf in parameters}) < len(parameters) or not all(
        leaf.requires_grad for leaf in parameters
    )


def _pooled_first(layers: nn.Sequential) -> list[tuple[str, nn.Module]]:
    """Return the layers by name, a ReLU after the pooling that follows it: the same numbers for less work."""
    every = layers.named_modules(remove_duplicate=False)
    named = [(name, layer) for name, layer in every if name and "." not in name]
    for before, place in pairwise(range(len(named))):
        if type(named[before][1]) is nn.ReLU and type(named[place][1]) is nn.MaxPool2d:
            named[before], named[place] = named[place], named[before]
    return named


def _of_several(layer: nn.Module, channels: int | None) -> nn.Module | None:
    """Return a layer for several devices, whose input are pictures of so many channels or, for None, vectors.

    By exact type: what a class derived from a layer does, nobody knows here.
    """
    match type(layer), layer, channels:
        case (nn.Linear, nn.Linear(), None):
            return Linear(layer)
        case (nn.Conv2d, nn.Conv2d(padding_mode="zeros"), int()):
            return Convolution(layer)
        case (nn.Flatten, nn.Flatten(start_dim=1, end_dim=-1), _):
            return nn.Identity() if channels is None else Flatten(channels)
    if type(layer) in ELEMENTWISE or (channels is not None and type(layer) in CHANNELWISE):
        return layer
    return None


def stacks_of(network: nn.Sequential, start: Tree, count: int) -> Tree:
    """Return the same parameters for K devices, by name and of shape (K, ...).

    Args:
        count: K.
    """
    leaves = {name: start[name] for name, _ in network.named_parameters()}
    return {
        name: leaf.expand(count, *leaf.shape).clone(memory_format=torch.contiguous_format)
        for name, leaf in leaves.items()
    }


def load_stacks(network: nn.Sequential, stacks: Tree, count: int) -> None:
    """Have the network compute with the first devices of the stacks, in place; the others stay as they are.

    Args:
        stacks: Parameters of shape (K, ...).
        count: How many of the K compute.
    """
    for name, stack in stacks.items():
        owner, _, own = name.rpartition(".")
        setattr(network.get_submodule(owner), own, nn.Parameter(stack[:count]))


FEWEST, MOST = 8, 32
"""Measured by tests/benchmarks/together.py on two cores of an AMD EPYC (1 MiB of second-level cache, 32 MiB of
third-level cache shared), one thread, torch 2.13: beyond the room a larger stack gains nothing or loses.

Times the rate of one device after the other, channels last, ten devices, batch 8 / 32: perceptron of 10,000 weights
3.1 / 3.1, of 100,000 1.8 / 1.4; convolutions of 8 x 8 pixels 4.2 / 3.0; LeNet 2.6 / 1.8; convolutions of 60,000 weights
2.5 / 1.4. Where fewer than eight devices have room a step keeps the processor busy by itself, and nothing is left of
the gain in whole replays: 0.9 to 1.1 for the last one in batches of 32.
"""


FLOAT_BYTES, COPIES = 4, 4


def correction_of(algorithm: Algorithm) -> tuple[bool, Correction | None]:
    """Tell whether an algorithm's device half is `LocalSgd`, and with what correction of the gradients."""
    half = algorithm.local
    return (True, half.correct) if isinstance(half, LocalSgd) else (False, None)


def devices_per_pass(layers: nn.Module, example: torch.Size, batch_size: int) -> int:
    """Return how many devices train in one pass; 1 where the network cannot be stacked, or that does not pay.

    As many as have room in the cache with all that a step touches: parameters, gradients, momentum and change, and what
    every layer leaves for the way back. Where that is fewer than `FEWEST`, a network keeps the processor busy alone.

    Args:
        layers: The network; only its shapes count.
        example: Shape of one input.
    """
    if not isinstance(layers, nn.Sequential) or stack_networks(layers, example) is None:
        return 1
    weights = sum(leaf.numel() for leaf in layers.parameters())
    fitting = ROOM_BYTES // (FLOAT_BYTES * (COPIES * weights + batch_size * _activations(layers, example)))
    return min(MOST, fitting) if fitting >= FEWEST else 1


def divide_cohort(plan: Plan, cohort: int, example: torch.Size) -> int:
    """Return how many devices of a cohort one process trains at once, some being left for other processes.

    How many processes there are must not count: a replay's record is the same for any number.

    Args:
        plan: Its model, batch size and switch.
        cohort: Devices in a round.
        example: Shape of one example.

    Raises:
        ConfigError: The plan's algorithm or model cannot be built.
    """
    if not correction_of(build(ALGORITHMS, plan.algorithm, "algorithm"))[0]:
        return 1
    return min(devices_per_pass(build_skeleton(plan.model), example, plan.hyper.batch_size), math.ceil(cohort / PARTS))


def _activations(layers: nn.Sequential, example: torch.Size) -> int:
    """Return how many numbers one example is, layer after layer; nothing is computed."""
    flowing = torch.empty((1, *example), device="meta")
    count = flowing.numel()
    for layer in layers:
        shapes = {name: torch.empty_like(leaf, device="meta") for name, leaf in layer.named_parameters()}
        flowing = functional_call(layer, shapes, (flowing,))
        count += flowing.numel()
    return count


def train(
    network: nn.Sequential, start: Tree, batches: Sequence[Batches], hyper: Hyper, correct: Correction | None = None
) -> list[Result]:
    """Do what `local_sgd` does, for several devices at once; return their results in the same order.

    Args:
        start: The parameters that all of them start from.
        batches: Each device's own; one with more examples has no fewer steps.
        hyper: Of all of them.
        correct: Changes gradients in place, as in `local_sgd`.
    """
    order = sorted(range(len(batches)), key=lambda index: -batches[index].num_examples)
    stacks, active = stacks_of(network, start, len(order)), 0
    momenta = {name: torch.zeros_like(stack) for name, stack in stacks.items()} if hyper.momentum else {}
    losses, seen = torch.zeros(len(order), dtype=torch.float64), torch.zeros(len(order), dtype=torch.int64)
    for step in _steps([batches[index] for index in order]):
        inputs, labels = _side_by_side(step)
        sizes = torch.tensor([len(own) for _, own in step])
        if len(step) != active:
            load_stacks(network, stacks, active := len(step))
        every = functional.cross_entropy(network(inputs), labels, reduction="none")
        every.backward((1 / sizes.clamp_min(1).to(every.dtype))[:, None].expand_as(every))
        if correct:
            correct(network, start)
        own = {name: momentum[: len(step)] for name, momentum in momenta.items()}
        descend(network.named_parameters(), own, hyper)
        losses[: len(step)] += every.detach().sum(1)
        seen[: len(step)] += sizes
    moved = {name: stack.sub_(start[name]) for name, stack in stacks.items()}
    results = {
        index: Result(
            {name: stack[place] for name, stack in moved.items()},
            float(batches[index].num_examples),
            batches[index].num_examples,
            losses[place].item() / count if (count := int(seen[place])) else None,
        )
        for place, index in enumerate(order)
    }
    return [results[index] for index in range(len(batches))]


def _steps(batches: Sequence[Batches]) -> Iterator[list[Batch]]:
    """Yield, step by step, the batches of the devices that still train: the first of those that did before."""
    own = [iter(each) for each in batches]
    while step := [batch for each in own if (batch := next(each, None)) is not None]:
        yield step
        del own[len(step) :]


def _side_by_side(step: Sequence[Batch]) -> Batch:
    """Return inputs of shape (K, B, ...) and labels of shape (K, B), small batches filled up with what counts not."""
    most = max(len(labels) for _, labels in step)
    if all(len(labels) == most for _, labels in step):
        return torch.stack([inputs for inputs, _ in step]), torch.stack([labels for _, labels in step])
    first, _ = step[0]
    inputs = first.new_zeros((len(step), most, *first.shape[1:]))
    labels = torch.full((len(step), most), NOBODY)
    for place, (own_inputs, own_labels) in enumerate(step):
        inputs[place, : len(own_labels)], labels[place, : len(own_labels)] = own_inputs, own_labels
    return inputs, labels
