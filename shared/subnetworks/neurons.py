"""Select neurons of a chain of layers; extract and merge their parameters.

A neuron is an output of a hidden layer: a channel of a convolution, a unit of a linear layer. Inputs and outputs of the
network are never left out. A weight belongs to a choice of neurons if both its ends do; a bias, and a number of a
BatchNorm, if its neuron does. After a Flatten, each channel owns a block of columns of the next layer.

Z. Niu, H. Dong, A. K. Qin: FedSPU, AAAI 2025, section 3. https://arxiv.org/abs/2403.11464
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from shared.errors import ConfigError, WireError
from shared.models.chain import named_layers
from shared.subnetworks.chain import require_straight
from shared.tensors.counts import floor_share
from shared.tensors.feature_dropout import DrawnDropout
from shared.tensors.tree import Tree

Active: TypeAlias = Mapping[str, Tensor]
"""Active neurons by name of a hidden layer: int64, ascending."""
Index: TypeAlias = Mapping[str, tuple[Tensor | None, Tensor | None]]
"""Rows and columns that belong to a choice of neurons, by name of a leaf; None for all."""
PREFIX = "active/"
_WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
_WITHOUT_WEIGHTS = (
    *(nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Identity),
    *(nn.Dropout, nn.Dropout2d, DrawnDropout),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d),
    nn.Flatten,
)


class Leaf(msgspec.Struct, frozen=True):
    """Layers of the neurons of a leaf's rows and columns; empty names for the network's inputs and outputs.

    Attributes:
        rows, columns: Names of hidden layers.
        block: Adjacent columns of one neuron.
    """

    rows: str = ""
    columns: str = ""
    block: int = 1


class Chain(msgspec.Struct, frozen=True):
    """Structure of a network: which parameters belong to which neurons.

    Attributes:
        hidden: Neurons of each hidden layer, from the input on.
        leaves: Leaves of the state dict in order, without BatchNorm's counts of batches, which belong to no neuron.
    """

    hidden: dict[str, int]
    leaves: dict[str, Leaf]

    def text(self) -> str:
        """Return the chain as JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def parse(cls, text: str) -> Chain:
        """Read the output of `text`."""
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
    """Read a network's structure; parameters need no storage.

    Raises:
        ConfigError: It is not a plain chain, or has a layer of an unsupported type.
    """
    ordered = named_layers(layers)
    _require_known(ordered)
    require_straight(layers)
    weighty = [name for name, layer in ordered if type(layer) in _WEIGHTED]
    if not weighty:
        raise ConfigError("model: no layer has weights; choose one with convolutions or linear layers")
    hidden: dict[str, int] = {}
    leaves: dict[str, Leaf] = {}
    below = ""
    for name, layer in ordered:
        if isinstance(layer, _WEIGHTED):
            rows = name if name != weighty[-1] else ""
            block = layer.weight.shape[1] // hidden[below] if below else 1
            leaves[f"{name}.weight"] = Leaf(rows, below, block)
            if layer.bias is not None:
                leaves[f"{name}.bias"] = Leaf(rows)
            if rows:
                hidden[name] = layer.weight.shape[0]
            below = rows
        elif type(layer) in _NORMS:
            tensors = [key for key, leaf in layer.state_dict().items() if leaf.ndim]
            leaves |= {f"{name}.{key}": Leaf(below) for key in tensors}
    return Chain(hidden, leaves)


def _require_known(layers: Sequence[tuple[str, nn.Module]]) -> None:
    for name, layer in layers:
        if type(layer) not in {*_WEIGHTED, *_NORMS, *_WITHOUT_WEIGHTS} or getattr(layer, "groups", 1) != 1:
            raise ConfigError(
                f"model: layer {name} is a {type(layer).__name__}, whose neurons cannot be left out; "
                "choose a chain of convolutions, linear layers, BatchNorm, pooling and activations"
            )


def block_columns(neurons: Tensor, block: int) -> Tensor:
    """Return the columns of neurons with `block` columns each, in order."""
    if block == 1:
        return neurons
    return (neurons[:, None] * block + torch.arange(block, device=neurons.device)).flatten()


def count_active(count: int, keep: float) -> int:
    """Return floor(keep count), at least one."""
    return max(1, floor_share(keep, count))


def draw_neurons(hidden: Mapping[str, int], keep: float, seed: int) -> dict[str, Tensor]:
    """Draw a share of every hidden layer's neurons, uniformly and without replacement.

    Args:
        hidden: Neurons of each hidden layer, by name.
        keep: Share to draw, in (0, 1].
    """
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randperm(count, generator=generator)[: count_active(count, keep)].sort().values
        for name, count in hidden.items()
    }


def first_neurons(hidden: Mapping[str, int], keep: float) -> dict[str, Tensor]:
    """Return the first neurons of every hidden layer, as in FjORD."""
    return {name: torch.arange(count_active(count, keep)) for name, count in hidden.items()}


def all_neurons(hidden: Mapping[str, int]) -> dict[str, Tensor]:
    """Return all neurons of every hidden layer."""
    return first_neurons(hidden, 1.0)


def extract(tree: Tree, index: Index) -> Tree:
    """Return the leaves of the index, restricted to its rows and columns."""
    return {key: _select(tree[key], *index[key]) for key in index}


def merge(full: Tree, part: Tree, index: Index) -> Tree:
    """Return the full tree with a part replaced; the rest is unchanged, and untouched leaves are not copied.

    Args:
        full: Leaves of full shape, (n, m, ...).
        part: Leaves of active rows and columns alone, (k, j, ...).
        index: Active rows and columns.
    """
    return full | {key: _assign_part(full[key].clone(), leaf, *index[key]) for key, leaf in part.items()}


def spread(part: Tree, index: Index, like: Tree) -> Tree:
    """Return a part in leaves of full shape, zero elsewhere.

    Args:
        part: Leaves of active rows and columns alone, (k, j, ...).
        index: Active rows and columns.
        like: Leaves of full shape, (n, m, ...).
    """
    return {key: _assign_part(torch.zeros_like(like[key]), leaf, *index[key]) for key, leaf in part.items()}


def coverage(index: Index, like: Tree) -> dict[str, Tensor]:
    """Return masks of full shape, True for coordinates of the choice; none for leaves that belong to it completely."""
    masks = {}
    for key, (rows, columns) in index.items():
        if rows is not None or columns is not None:
            ones = torch.ones((), dtype=torch.bool)
            masks[key] = _assign_part(torch.zeros(like[key].shape, dtype=torch.bool), ones, rows, columns)
    return masks


def count_parameters(index: Index, like: Tree) -> int:
    """Return |A_k|, the number of parameters of the choice."""
    return sum(_select(like[key].to("meta"), *_to_meta(index[key])).numel() for key in index)


def pack(active: Active, hidden: Mapping[str, int]) -> Tree:
    """Return bitmaps of neurons, lowest bit of a byte first: u8 leaves of ceil(n / 8) bytes."""
    packed: Tree = {}
    for name, count in hidden.items():
        bits = np.zeros(count, np.bool_)
        bits[active[name].numpy(force=True)] = True
        packed[PREFIX + name] = torch.from_numpy(np.packbits(bits, bitorder="little"))
    return packed


def unpack(tree: Tree, hidden: Mapping[str, int]) -> dict[str, Tensor]:
    """Read the output of `pack`, on the device of the bitmaps.

    Raises:
        WireError: A bitmap is missing, has another length, or selects no neuron or one out of range.
    """
    active = {}
    for name, count in hidden.items():
        packed = tree.get(PREFIX + name)
        if packed is None or packed.dtype != torch.uint8 or packed.shape != (-(-count // 8),):
            raise WireError(f"layer {name}: bitmap of {count} neurons is missing or invalid", reason="shape")
        bits = np.unpackbits(packed.numpy(force=True), bitorder="little")
        if not bits.any() or bits[count:].any():
            raise WireError(
                f"layer {name}: its bitmap selects no neuron of {count}, or one out of range", reason="shape"
            )
        active[name] = torch.from_numpy(np.flatnonzero(bits)).to(packed.device)
    return active


def _select(leaf: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    if rows is not None:
        leaf = leaf.index_select(0, rows)
    return leaf if columns is None else leaf.index_select(1, columns)


def _assign_part(target: Tensor, part: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    if rows is None and columns is None:
        return target.copy_(part)
    if columns is None:
        target[rows] = part
    elif rows is None:
        target[:, columns] = part
    else:
        target[rows[:, None], columns] = part
    return target


def _to_meta(both: tuple[Tensor | None, Tensor | None]) -> tuple[Tensor | None, Tensor | None]:
    rows, columns = both
    return None if rows is None else rows.to("meta"), None if columns is None else columns.to("meta")
