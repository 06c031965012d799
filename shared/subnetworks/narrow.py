"""Build a physically smaller network from the active neurons of a subnetwork."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from shared.models.chain import LayerChain, chain_of, named_layers
from shared.subnetworks.neurons import Active, read_chain
from shared.tensors.tree import device_of


def build_narrow_network(layers: nn.Sequential, active: Active) -> nn.Sequential:
    """Return a network of the active neurons alone; parameters have the names of the whole network's.

    It computes the same as the whole network with zero outputs of all other neurons. Nothing is initialised: load the
    part of a tree that belongs to the neurons. Only shapes of `layers` are read; if they have storage, the result is on
    the same device. It is in training mode, with channels-last memory layout.

    Raises:
        ConfigError: The network is not a plain chain of layers.
    """
    index, narrow, width = read_chain(layers).index(active), list[tuple[str, nn.Module]](), 0
    for name, layer in named_layers(layers):
        match layer:
            case nn.Conv1d() | nn.Conv2d() | nn.Linear():
                rows, columns = index[f"{name}.weight"]
                inputs = layer.weight.shape[1] if columns is None else len(columns)
                width = layer.weight.shape[0] if rows is None else len(rows)
                smaller = _build_weighted(layer, inputs, width)
            case nn.BatchNorm1d() | nn.BatchNorm2d():
                smaller = _build_norm(layer, width or layer.num_features)
            case _:
                smaller = copy.deepcopy(layer)
        narrow.append((name, smaller))
    network = chain_of(narrow) if isinstance(layers, LayerChain) else nn.Sequential(OrderedDict(narrow))
    # not `to_empty`, which imports a symbolic algebra package of 50 MB for tensors without storage
    device = device_of(layers.parameters())
    network._apply(lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype, device=device)).train()  # noqa: SLF001
    for layer in network:
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            layer.reset_running_stats()  # including the count of batches, which belongs to no neuron
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's stubs
    return network


def _build_weighted(layer: nn.Conv1d | nn.Conv2d | nn.Linear, inputs: int, outputs: int) -> nn.Module:
    biased, dtype = layer.bias is not None, layer.weight.dtype
    if isinstance(layer, nn.Linear):
        return nn.Linear(inputs, outputs, bias=biased, device="meta", dtype=dtype)
    names = ("stride", "padding", "dilation", "padding_mode")
    options: dict[str, Any] = {name: getattr(layer, name) for name in names}
    kernel: Any = layer.kernel_size
    return type(layer)(inputs, outputs, kernel, bias=biased, device="meta", dtype=dtype, **options)


def _build_norm(layer: nn.BatchNorm1d | nn.BatchNorm2d, features: int) -> nn.Module:
    return type(layer)(features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats, device="meta")
