"""Freeze leaves of a network, and add low-rank adapters to its layers.

An adapter of a layer with the weight W, for a linear layer of shape (out, in), is

    W x + alpha / r B A x          A of shape (r, in), B of shape (out, r), B = 0 at first

and for a convolution, A is one with r channels and W's kernel, and B one of kernel 1. W + alpha / r B A is the merged
weight, with which the plain network computes the same.

E. J. Hu et al. LoRA: Low-Rank Adaptation of Large Language Models. ICLR 2022. https://arxiv.org/abs/2106.09685
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from shared.errors import ConfigError
from shared.models.base import Model
from shared.models.initial_weights import write_uniform
from shared.models.leaves import read_leaves, tied_names
from shared.models.running_statistics import freeze_statistics
from shared.protocol.adaptation import Lora, NetworkAdaptation
from shared.spelling import guess
from shared.tensors.tree import Tree

A, B = "lora_a", "lora_b"
"""Parameters of an adapter in its layer."""
_CONVOLVE: Mapping[type[nn.Module], Callable[..., Tensor]] = {
    nn.Conv1d: functional.conv1d,
    nn.Conv2d: functional.conv2d,
}
MOST_NAMED = 4


def adapt(model: Model, adaptation: NetworkAdaptation, seed: int | None = None) -> Model:
    """Freeze leaves of a network and add its adapters, in place; return it.

    Args:
        model: With or without storage.
        seed: Seed of the adapters' first values; None to leave them at zero.

    Raises:
        ConfigError: A name matches nothing; the message names the nearest one.
    """
    if adaptation.lora:
        _add_adapters(model.layers, adaptation.lora, seed)
    return freeze(model, frozen_names(model, adaptation))


def freeze(model: Model, names: Iterable[str]) -> Model:
    """Exclude leaves of a network from training, in place; return it.

    Batch normalisation whose statistics are among them normalises by them in training, and does not change them.
    """
    frozen = {*names}
    for name, parameter in model.layers.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    freeze_statistics(model.layers, frozen)
    return replace(model)


def frozen_names(model: Model, adaptation: NetworkAdaptation) -> frozenset[str]:
    """Return the names of the leaves that are not trained.

    Args:
        model: With its adapters, if there are any.

    Raises:
        ConfigError: A name matches nothing, or nothing is left to train.
    """
    leaves = read_leaves(model.layers)
    frozen = select_names(leaves, adaptation.frozen, "model.freeze")
    if adaptation.lora:
        trained = select_names(leaves, adaptation.lora.train, "lora.train")
        frozen |= {name for name in leaves if name not in trained and not is_adapter(name)}
    if frozen >= {name for name, _ in model.layers.named_parameters()}:
        raise ConfigError("model.freeze: every parameter is frozen, and nothing is left to train; name fewer")
    return frozen


def select_names(names: Iterable[str], patterns: Iterable[str], key: str) -> frozenset[str]:
    """Return the names that a pattern matches: the name itself, or a layer that it belongs to.

    Args:
        key: Key of the plan that has the patterns, for messages.

    Raises:
        ConfigError: A pattern matches nothing.
    """
    prefixes = {name: [name, *_parents(name)] for name in names}
    selected = set[str]()
    for pattern in patterns:
        matched = {name for name, each in prefixes.items() if any(fnmatchcase(prefix, pattern) for prefix in each)}
        if not matched:
            every = [prefix for each in prefixes.values() for prefix in each]
            near = guess(pattern, every) or guess(pattern.rstrip(".*"), every)
            parts = ", ".join([*dict.fromkeys(name.partition(".")[0] for name in prefixes)][:MOST_NAMED])
            raise ConfigError(f"{key}: {pattern!r} matches nothing in the network{near or f'; it has {parts}'}")
        selected |= matched
    return frozenset(selected)


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def is_adapter(name: str) -> bool:
    """Check for the name of an adapter's parameter."""
    return name.rpartition(".")[2] in (A, B)


def _add_adapters(network: nn.Module, lora: Lora, seed: int | None) -> None:
    tied = {*tied_names(network), *tied_names(network).values()}
    able = {
        name: layer
        for name, layer in network.named_modules()
        if name and (type(layer) is nn.Linear or (type(layer) in _CONVOLVE and layer.groups == 1))
    }
    if not able:
        raise ConfigError("lora.layers: the network has no linear or convolution layer to adapt")
    for name in sorted(select_names(able, lora.layers, "lora.layers")):
        layer = able[name]
        if f"{name}.weight" in tied:
            raise ConfigError(f"lora.layers: the weight of {name!r} is shared with another layer; leave it out")
        weight = layer.get_parameter("weight")
        inputs = weight.new_zeros((lora.rank, weight[0].numel()))
        if seed is not None:
            write_uniform(inputs, seed, f"{name}.{A}", inputs.shape[1])
        layer.register_parameter(A, nn.Parameter(inputs))
        layer.register_parameter(B, nn.Parameter(weight.new_zeros((len(weight), lora.rank))))
        layer.register_forward_hook(partial(_add_adapter, lora.alpha / lora.rank))


def _add_adapter(scale: float, layer: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> Tensor:
    """Return a layer's outputs with those of its adapter."""
    a, b = getattr(layer, A), getattr(layer, B)  # plain tensors in a functional call
    if isinstance(layer, nn.Linear):
        return outputs + scale * functional.linear(functional.linear(inputs[0], a), b)
    assert isinstance(layer, nn.Conv1d | nn.Conv2d)
    narrow = layer._conv_forward(inputs[0], a.view(len(a), *layer.weight.shape[1:]), None)  # noqa: SLF001 - as forward
    kernel = b.view((*b.shape, *(1 for _ in layer.kernel_size)))
    return outputs + scale * _CONVOLVE[type(layer)](narrow, kernel)


def merge(tree: Tree, lora: Lora) -> Tree:
    """Return the plain network's leaves: each weight with its adapter added.

    Args:
        tree: Leaves of the network with adapters; others stay.
    """
    merged = {name: leaf for name, leaf in tree.items() if not is_adapter(name)}
    for name, a in tree.items():
        layer, _, last = name.rpartition(".")
        if last == A:
            weight = tree[f"{layer}.weight"]
            change = (tree[f"{layer}.{B}"] @ a).view(weight.shape)
            merged[f"{layer}.weight"] = torch.add(weight, change, alpha=lora.alpha / lora.rank)
    return merged
