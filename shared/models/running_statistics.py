"""Measure BatchNorm's running statistics over batches, with fixed parameters.

Statistics from training are averages over steps with changing parameters, over devices, and over dropped features. For
n batches through the fixed network,

    mu = 1/n sum_i mean(x_i)        sigma^2 = 1/n sum_i var(x_i)

where x_i is the layer's input of batch i, and each layer normalises by the batch's statistics while they are measured:
`update_bn` of P. Izmailov et al., Averaging Weights Leads to Wider Optima and Better Generalization, UAI 2018,
https://arxiv.org/abs/1803.05407, section 3.2. Dropout is inactive, as in evaluation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shared.models.leaves import call_with
from shared.tensors.tree import Tree

Norm: TypeAlias = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
FIGURES = ("running_mean", "running_var")
FROZEN = "has_frozen_statistics"
"""Attribute of a layer whose statistics stay as they are."""
COUNTER = "num_batches_tracked"


def statistic_names(network: nn.Module) -> tuple[str, ...]:
    """Return the names of the running statistics among the leaves; empty without any."""
    return tuple(f"{name}.{figure}" for name, _ in _norm_layers(network) for figure in FIGURES)


def has_batch_norm(network: nn.Module) -> bool:
    """Return True if a layer normalises by statistics of its batch, which may be undefined for one example."""
    return any(isinstance(layer, _BatchNorm) for layer in network.modules())


@torch.no_grad()
def measure_batch(network: nn.Module, tree: Tree, inputs: Tensor, before: int = 0) -> tuple[Tensor, Tree]:
    """Pass a batch; return its outputs, and the tree with the statistics averaged over one more batch.

    Args:
        network: With or without storage.
        tree: Parameters and buffers, and perhaps other leaves; not changed.
        inputs: Of shape (B, ...).
        before: Number of batches in the tree's statistics; with 0 they do not count.

    Raises:
        ValueError: A layer cannot normalise so few values.
    """
    norms = _norm_layers(network)
    names = network.state_dict().keys()
    leaves = {name: leaf for name, leaf in tree.items() if name in names}
    for name, _ in norms:
        for figure in FIGURES:
            leaf = leaves[f"{name}.{figure}"]
            leaves[f"{name}.{figure}"] = leaf.clone() if before else torch.zeros_like(leaf)
        leaves[f"{name}.{COUNTER}"] = torch.tensor(before)
    with _averaging_mode(network, [layer for _, layer in norms]):
        outputs: Tensor = call_with(network, leaves, inputs)
    return outputs, {**tree, **{name: leaves[name] for name in statistic_names(network)}}


def measure_statistics(network: nn.Module, tree: Tree, batches: Iterable[Tensor]) -> Tree:
    """Return a tree with running statistics measured over batches; unchanged without a batch.

    Args:
        network: With or without storage.
        tree: Parameters and buffers; not changed.
        batches: Inputs, each of shape (B, ...); batches of a single example, which may have no variance, do not count.
    """
    return measure_several(network, tree, batches)[0]


def measure_several(network: nn.Module, tree: Tree, batches: Iterable[Tensor]) -> tuple[Tree, int]:
    """Return the tree as `measure_statistics`, and the number of batches that count.

    Args:
        network: With or without storage.
        tree: Parameters and buffers; not changed.
        batches: Inputs, each of shape (B, ...).
    """
    count = 0
    for inputs in batches:
        if len(inputs) > 1:
            _, tree = measure_batch(network, tree, inputs, count)
            count += 1
    return tree, count


def freeze_statistics(network: nn.Module, names: Collection[str]) -> None:
    """Keep layers whose statistics are among `names` in evaluation mode from now on, and do not measure them again."""
    for name, layer in _norm_layers(network):
        if f"{name}.{FIGURES[0]}" in names:
            layer.eval()
            setattr(layer, FROZEN, True)
            setattr(layer, "train", partial(_stay, layer))  # noqa: B010 - mypy takes it for a method of each class


def _stay(layer: Norm, _mode: bool = True) -> Norm:  # noqa: FBT001, FBT002 - as `nn.Module.train`
    """Replace the `train` of a frozen layer."""
    return layer


def _norm_layers(network: nn.Module) -> list[tuple[str, Norm]]:
    return [
        (name, layer)
        for name, layer in network.named_modules()
        if isinstance(layer, Norm) and layer.running_mean is not None and not hasattr(layer, FROZEN)
    ]


@contextmanager
def _averaging_mode(network: nn.Module, norms: Sequence[Norm]) -> Iterator[None]:
    """Let BatchNorm average all batches equally inside the block, with all other layers in evaluation mode."""
    modes = [(module, module.training) for module in network.modules()]
    momenta = [layer.momentum for layer in norms]
    network.eval()
    try:
        for layer in norms:
            layer.train()
            layer.momentum = None
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for layer, momentum in zip(norms, momenta, strict=True):
            layer.momentum = momentum
