"""Narrow network: a physically smaller network of some neurons, as dropout methods train."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from shared.subnetworks.chain import named_layers
from shared.subnetworks.neurons import Active, read_chain
from shared.tensors.placement import device_of


def build_narrowed(layers: nn.Sequential, active: Active) -> nn.Sequential:
    """Return a network of the active neurons alone; parameters have the names that they have in the whole.

    It computes what the whole one does whose other neurons give zero. Nothing is initialised: load the part of a tree
    that belongs to the neurons. Only shapes of `layers` are read, it needs no storage; where it has some, the smaller
    one's is on the same device. It is in training mode, and a pixel's channels lie side by side.

    Raises:
        ConfigError: The network is no chain of layers whose neurons can be told apart.
    """
    index, found, width = read_chain(layers).index(active), nn.Sequential(), 0
    for name, layer in named_layers(layers):
        match layer:
            case nn.Conv1d() | nn.Conv2d() | nn.Linear():
                rows, columns = index[f"{name}.weight"]
                inputs = layer.weight.shape[1] if columns is None else len(columns)
                width = layer.weight.shape[0] if rows is None else len(rows)
                smaller = _weighty(layer, inputs, width)
            case nn.BatchNorm1d() | nn.BatchNorm2d():
                smaller = _norm(layer, width or layer.num_features)
            case _:
                smaller = copy.deepcopy(layer)
        found.add_module(name, smaller)
    # not `to_empty`, which of a tensor without storage imports an algebra of 50 MB
    place = device_of(layers.parameters())
    found._apply(lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype, device=place)).train()  # noqa: SLF001
    for layer in found:
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            layer.reset_running_stats()  # the count of batches among them, which is no neuron's
    found.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # its stubs lack it
    return found


def _weighty(layer: nn.Conv1d | nn.Conv2d | nn.Linear, inputs: int, outputs: int) -> nn.Module:
    biased, dtype = layer.bias is not None, layer.weight.dtype
    if isinstance(layer, nn.Linear):
        return nn.Linear(inputs, outputs, bias=biased, device="meta", dtype=dtype)
    names = ("stride", "padding", "dilation", "padding_mode")
    options: dict[str, Any] = {name: getattr(layer, name) for name in names}
    kernel: Any = layer.kernel_size
    return type(layer)(inputs, outputs, kernel, bias=biased, device="meta", dtype=dtype, **options)


def _norm(layer: nn.BatchNorm1d | nn.BatchNorm2d, features: int) -> nn.Module:
    return type(layer)(features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats, device="meta")
