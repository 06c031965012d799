"""Neurons of a chain of layers, and the parameters that belong to them.

A neuron is an output of a hidden layer: a channel of a convolution, a unit of a linear layer. Inputs and outputs of the
network are never left out. A weight belongs to a choice of neurons if both its ends do; a bias, and a number of a
BatchNorm, if its neuron does. After a Flatten, each channel owns a block of columns of the next layer.

Z. Niu, H. Dong, A. K. Qin: FedSPU, AAAI 2025, section 3. https://arxiv.org/abs/2403.11464
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from shared.errors import ConfigError, WireError
from shared.subnetworks.chain import named_layers, require_straight
from shared.tensors.counts import floor_share
from shared.tensors.feature_dropout import DrawnDropout
from shared.tensors.tree import Tree

Active: TypeAlias = Mapping[str, Tensor]
"""By name of a hidden layer, its active neurons: int64, ascending."""
Index: TypeAlias = Mapping[str, tuple[Tensor | None, Tensor | None]]
"""By name of a leaf, the rows and the columns of it that belong to a choice of neurons; None for all."""
PREFIX = "active/"
_WEIGHTY = (nn.Linear, nn.Conv1d, nn.Conv2d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
_THROUGH = (
    *(nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Identity),
    *(nn.Dropout, nn.Dropout2d, DrawnDropout),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d),
    nn.Flatten,
)


class Leaf(msgspec.Struct, frozen=True):
    """Whose neurons the rows and the columns of a leaf are; empty names for the network's own inputs and outputs.

    Attributes:
        rows, columns: Names of hidden layers.
        block: Columns beside each other that belong to one neuron.
    """

    rows: str = ""
    columns: str = ""
    block: int = 1


class Chain(msgspec.Struct, frozen=True):
    """What of a network decides which parameters belong to which neurons.

    Attributes:
        hidden: Neurons of each hidden layer, from the input on.
        leaves: Of the state dict, in its order, but for BatchNorm's counts of batches, which belong to nobody.
    """

    hidden: dict[str, int]
    leaves: dict[str, Leaf]

    def text(self) -> str:
        """Return the chain as JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def parse(cls, text: str) -> Chain:
        """Read what `text` wrote."""
        return msgspec.json.decode(text, type=cls)

    def index(self, active: Active) -> Index:
        """Return the rows and columns that belong to a choice of neurons."""
        return {
            key: (
                active[leaf.rows] if leaf.rows else None,
                block_columns(active[leaf.columns], leaf.block) if leaf.columns else None,
            )
            for key, leaf in self.leaves.items()
        }


def read_chain(layers: nn.Sequential) -> Chain:
    """Read a network; no parameter needs storage.

    Raises:
        ConfigError: It is no plain chain, or a layer is of a kind whose neurons cannot be told apart.
    """
    require_straight(layers)
    named = named_layers(layers)
    weighty = [name for name, layer in named if type(layer) in _WEIGHTY]
    if not weighty:
        raise ConfigError("model: no layer has weights; choose one with convolutions or linear layers")
    hidden: dict[str, int] = {}
    leaves: dict[str, Leaf] = {}
    below = ""
    for name, layer in named:
        if isinstance(layer, _WEIGHTY) and type(layer) in _WEIGHTY and getattr(layer, "groups", 1) == 1:
            rows = name if name != weighty[-1] else ""
            block = layer.weight.shape[1] // hidden[below] if below else 1
            leaves[f"{name}.weight"] = Leaf(rows, below, block)
            if layer.bias is not None:
                leaves[f"{name}.bias"] = Leaf(rows)
            if rows:
                hidden[name] = layer.weight.shape[0]
            below = rows
        elif type(layer) in _NORMS:
            own = [key for key, leaf in layer.state_dict().items() if leaf.ndim]
            leaves |= {f"{name}.{key}": Leaf(below) for key in own}
        elif type(layer) not in _THROUGH:
            raise ConfigError(
                f"model: layer {name} is a {type(layer).__name__}, whose neurons cannot be left out; "
                "choose a chain of convolutions, linear layers, BatchNorm, pooling and activations"
            )
    return Chain(hidden, leaves)


def block_columns(neurons: Tensor, block: int) -> Tensor:
    """Return the columns of neurons that own `block` columns each, in order."""
    if block == 1:
        return neurons
    return (neurons[:, None] * block + torch.arange(block, device=neurons.device)).flatten()


def count_kept(count: int, keep: float) -> int:
    """Return how many of `count` neurons a share of them is: rounded down, and at least one."""
    return max(1, floor_share(keep, count))


def draw_neurons(hidden: Mapping[str, int], keep: float, seed: int) -> dict[str, Tensor]:
    """Draw a share of every hidden layer's neurons, uniformly and without replacement.

    Args:
        hidden: Neurons of each hidden layer, by name.
        keep: Share of them to draw, in (0, 1].
        seed: What the draw is a function of.
    """
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randperm(count, generator=generator)[: count_kept(count, keep)].sort().values
        for name, count in hidden.items()
    }


def first_neurons(hidden: Mapping[str, int], keep: float) -> dict[str, Tensor]:
    """Return the first neurons of every hidden layer, as FjORD keeps them."""
    return {name: torch.arange(count_kept(count, keep)) for name, count in hidden.items()}


def all_neurons(hidden: Mapping[str, int]) -> dict[str, Tensor]:
    """Return all neurons."""
    return first_neurons(hidden, 1.0)


def extract(tree: Tree, index: Index) -> Tree:
    """Return what belongs to the choice: every leaf of the index, with its rows and columns alone."""
    return {key: _taken(tree[key], *index[key]) for key in index}


def merge(full: Tree, part: Tree, index: Index) -> Tree:
    """Return the full tree with a part of it replaced; all else keeps its bits, whole leaves without being copied.

    Args:
        full: Leaves of full shape, (n, m, ...).
        part: Leaves of active rows and columns alone, (k, j, ...).
        index: Which rows and columns these are.
    """
    return full | {key: _put(full[key].clone(), leaf, *index[key]) for key, leaf in part.items()}


def spread(part: Tree, index: Index, like: Tree) -> Tree:
    """Return a part in leaves of full shape, zero elsewhere.

    Args:
        part: Leaves of active rows and columns alone, (k, j, ...).
        index: Which rows and columns these are.
        like: Leaves of full shape, (n, m, ...).
    """
    return {key: _put(torch.zeros_like(like[key]), leaf, *index[key]) for key, leaf in part.items()}


def coverage(index: Index, like: Tree) -> dict[str, Tensor]:
    """Return masks of full shape, True where a coordinate belongs to the choice; none for leaves that do as a whole."""
    masks = {}
    for key, (rows, columns) in index.items():
        if rows is not None or columns is not None:
            ones = torch.ones((), dtype=torch.bool)
            masks[key] = _put(torch.zeros(like[key].shape, dtype=torch.bool), ones, rows, columns)
    return masks


def count_parameters(index: Index, like: Tree) -> int:
    """Return how many numbers belong to the choice: |A_k|."""
    return sum(_taken(like[key].to("meta"), *_meta(index[key])).numel() for key in index)


def pack(active: Active, hidden: Mapping[str, int]) -> Tree:
    """Return one bit a neuron, from the lowest bit of a byte on: u8 leaves of ceil(n / 8) bytes."""
    packed: Tree = {}
    for name, count in hidden.items():
        bits = np.zeros(count, np.bool_)
        bits[active[name].numpy(force=True)] = True
        packed[PREFIX + name] = torch.from_numpy(np.packbits(bits, bitorder="little"))
    return packed


def unpack(tree: Tree, hidden: Mapping[str, int]) -> dict[str, Tensor]:
    """Read what `pack` wrote; neurons are where their bitmaps are.

    Raises:
        WireError: A bitmap is missing, has another length, or names no neuron or more than there are.
    """
    active = {}
    for name, count in hidden.items():
        packed = tree.get(PREFIX + name)
        if packed is None or packed.dtype != torch.uint8 or packed.shape != (-(-count // 8),):
            raise WireError(f"layer {name}: no bitmap of {count} neurons", reason="shape")
        bits = np.unpackbits(packed.numpy(force=True), bitorder="little")
        if not bits.any() or bits[count:].any():
            raise WireError(f"layer {name}: its bitmap names no neuron of {count}", reason="shape")
        active[name] = torch.from_numpy(np.flatnonzero(bits)).to(packed.device)
    return active


def _taken(leaf: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    if rows is not None:
        leaf = leaf.index_select(0, rows)
    return leaf if columns is None else leaf.index_select(1, columns)


def _put(whole: Tensor, part: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    if rows is None and columns is None:
        return whole.copy_(part)
    if columns is None:
        whole[rows] = part
    elif rows is None:
        whole[:, columns] = part
    else:
        whole[rows[:, None], columns] = part
    return whole


def _meta(both: tuple[Tensor | None, Tensor | None]) -> tuple[Tensor | None, Tensor | None]:
    rows, columns = both
    return None if rows is None else rows.to("meta"), None if columns is None else columns.to("meta")
