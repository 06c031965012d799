"""Stack same-shaped networks of K devices into one network.

A chain of known layers is rebuilt: vectors have the shape (K, features, B), so that a linear layer of K devices is one
batched product; images have the shape (B, K x channels, height, width), channels last in memory, so that a convolution
of K devices is one convolution with K groups. Elementwise and per-channel layers are used unchanged.

Other networks are vectorised by `torch.func.vmap`. It makes groups of a convolution too, but copies around each of
them, which costs more than it saves: networks with images are not vectorised (tests/benchmarks/together.py).
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional

from shared.registry import FAULTS
from shared.tensors.tree import Tree

ELEMENTWISE = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Identity)


CHANNELWISE = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)


# Axes of an image: channels, height, width.
PICTURE = 3


class Linear(nn.Module):
    """K linear layers on inputs of shape (K, features, B), the faster layout for few outputs such as classes."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias  # replaced by `load_stacks`

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
    """Flatten images of K devices: (B, K x channels, height, width) -> (K, features, B)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self._channels = channels

    def forward(self, inputs: Tensor) -> Tensor:
        """Return vectors of shape (K, features, B)."""
        count, channels, *sides = inputs.shape
        several = inputs.view((count, channels // self._channels, self._channels, *sides))
        return several.transpose(0, 1).flatten(2).mT


class SideBySide(nn.Module):
    """Convert images of K devices from (K, B, channels, height, width) to the layout of `Convolution`."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return images of shape (B, K x channels, height, width)."""
        return inputs.transpose(0, 1).flatten(1, 2).contiguous(memory_format=torch.channels_last)


class Vectors(nn.Module):
    """Convert examples of K devices from (K, B, ...) to the layout of `Linear`."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return vectors of shape (K, features, B)."""
        return inputs.flatten(2).mT


class ByExample(nn.Module):
    """Convert vectors of K devices from the layout of `Linear` to (K, B, features)."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return vectors of shape (K, B, features)."""
        return inputs.mT


def stack_networks(layers: nn.Module, example: torch.Size) -> nn.Module | None:
    """Return a network for the examples of K devices, with the same parameter names.

    Once `load_stacks` has set its parameters, it maps inputs of shape (K, B, ...) to outputs of shape (K, B, ...).
    None if that is impossible or does not pay: with buffers, randomness, shared or frozen parameters, or images in a
    network that is no chain of known layers.

    Args:
        example: Shape of one input.
    """
    chain = _stack_chain(layers, example)
    return _vectorise(layers, example) if chain is None else chain


def _vectorise(layers: nn.Module, example: torch.Size) -> nn.Module | None:
    """Return a copy of a network whose forward maps it over K devices."""
    leaves = dict(layers.named_parameters())
    has_images = any(leaf.ndim > PICTURE for leaf in leaves.values())
    if not leaves or has_images or _is_tied(layers) or next(layers.buffers(), None) is not None:
        return None
    stacked, template = copy.deepcopy(layers), layers.train()
    compute = vmap(lambda each, inputs: functional_call(template, each, (inputs,)), randomness="error")

    def forward(inputs: Tensor) -> Tensor:
        outputs: Tensor = compute(dict(stacked.named_parameters()), inputs)
        return outputs

    try:  # without numbers, on devices and examples whose counts differ from each other
        blank = {name: leaf.new_empty((2, *leaf.shape), device="meta") for name, leaf in leaves.items()}
        inputs = next(iter(leaves.values())).new_empty((2, 3, *example), device="meta")
        outputs = compute(blank, inputs)
    except FAULTS:
        return None
    stacked.forward = forward
    return stacked if isinstance(outputs, Tensor) and outputs.shape[:2] == (2, 3) else None


def _stack_chain(layers: nn.Module, example: torch.Size) -> nn.Sequential | None:
    """Return a chain of stacked layers that ends in vectors; None if a layer is not known."""
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
    return nn.Sequential(OrderedDict([*chain, ("out", ByExample())])) if channels is None else None


def _is_tied(layers: nn.Module) -> bool:
    """Check for parameters that are shared or frozen."""
    parameters = [leaf for _, leaf in layers.named_parameters(remove_duplicate=False)]
    return len({id(leaf) for leaf in parameters}) < len(parameters) or not all(
        leaf.requires_grad for leaf in parameters
    )


def _pooled_first(layers: nn.Sequential) -> list[tuple[str, nn.Module]]:
    """Return the named layers with every ReLU moved behind the pooling that follows it: same result, less work."""
    every = layers.named_modules(remove_duplicate=False)
    named = [(name, layer) for name, layer in every if name and "." not in name]
    for before, place in pairwise(range(len(named))):
        if type(named[before][1]) is nn.ReLU and type(named[place][1]) is nn.MaxPool2d:
            named[before], named[place] = named[place], named[before]
    return named


def _of_several(layer: nn.Module, channels: int | None) -> nn.Module | None:
    """Return the stacked layer for images with this number of channels, or for vectors if None.

    Layers are matched by exact type, since a subclass may compute something else.
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


def repeat_parameters(network: nn.Module, start: Tree, count: int) -> Tree:
    """Return the start parameters repeated for K = `count` devices, of shape (K, ...), by name."""
    leaves = {name: start[name] for name, _ in network.named_parameters()}
    return {
        name: leaf.expand((count, *leaf.shape)).clone(memory_format=torch.contiguous_format)
        for name, leaf in leaves.items()
    }


def load_stacks(network: nn.Module, stacks: Tree, count: int) -> None:
    """Make the network compute with the first `count` devices of the stacks, which it shares.

    Args:
        stacks: Parameters of shape (K, ...).
    """
    for name, stack in stacks.items():
        owner, _, attribute = name.rpartition(".")
        setattr(network.get_submodule(owner), attribute, nn.Parameter(stack[:count]))
