"""Sizes for allocators: weights, and bytes sent by a method."""

from __future__ import annotations

import itertools

from edge_server.allocation.inputs import Sizes
from shared.algorithms.base import Algorithm
from shared.codecs import masked_entries
from shared.codecs.topk import STATISTICS, topk_bytes
from shared.errors import ConfigError
from shared.models.base import Model
from shared.protocol.messages import Assignment, Hyper, Spec
from shared.subnetworks import neurons as active
from shared.tensors.tree import State, Tree

BYTES = 4
MATRIX = 2
"""Minimum dimensions of a leaf with prunable weights; biases are never pruned."""


def uploaded_leaves(algorithm: Algorithm, state: State) -> Tree:
    """Return leaves as large as those of an update that leaves nothing out; meta tensors suffice."""
    down = algorithm.broadcast(state, "", Assignment(seed=0, hyper=Hyper()))
    return algorithm.resources.uploaded(down) if algorithm.resources.uploaded else down


def _size(leaves: Tree) -> int:
    return sum(leaf.nbytes for leaf in leaves.values())


def measure_model(algorithm: Algorithm, model: Model, state: State) -> Sizes:
    """Measure a model, and what an algorithm sends of it and beside it; meta tensors suffice."""
    leaves = model.tree()
    down, up = algorithm.broadcast(state, "", Assignment(seed=0, hyper=Hyper())), uploaded_leaves(algorithm, state)
    weights = sum(parameter.numel() for parameter in model.layers.parameters())
    counted = sum(leaf.numel() for key, leaf in down.items() if key in leaves and leaf.ndim >= MATRIX)
    declared = state.facts.get("global_weights", counted)
    shared = declared if isinstance(declared, int) else counted
    prunable = {key for key, leaf in up.items() if key in leaves and leaf.ndim >= MATRIX}
    return Sizes(
        weights=weights,
        shared=min(shared, weights),
        bytes=_size(leaves),
        download_bytes=_size(down),
        upload_bytes=_size(up),
        mixed_bytes=_size(algorithm.mixing.shared_tree(state)) if algorithm.mixing else _size(leaves),
        dense_bytes=sum(leaf.nbytes for key, leaf in up.items() if key not in prunable),
        facts=state.facts,
    )


def sent_bytes(codec: Spec, leaves: Tree, shares: list[float]) -> tuple[tuple[float, int], ...]:
    """Return (share, bytes) of updates that send a share of their change; only `topk` sends less than all.

    Args:
        leaves: Of a full update; meta tensors suffice.
        shares: In ascending order.
    """
    total = _size(leaves)
    if codec.name != "topk":
        return tuple((share, total) for share in shares)
    exact = masked_entries.read_names(str(codec.options.get("exact", "")))
    floating = masked_entries.divisible_leaves(leaves, 0, exact)
    parted = [leaf for key, leaf in floating.items() if key.rpartition(".")[2] not in STATISTICS]
    count, unparted = sum(leaf.numel() for leaf in parted), total - sum(leaf.nbytes for leaf in parted)
    sizes = itertools.accumulate((unparted + topk_bytes(count, share) for share in shares), max)
    return tuple(zip(shares, sizes, strict=True))


def update_bytes(model: Model, ratios: list[float]) -> tuple[tuple[float, int], ...]:
    """Return (ratio, bytes) of updates that keep a ratio of every hidden layer's neurons.

    In a model that is not a chain of layers, neurons cannot be identified; bytes are then proportional to the ratio.
    """
    leaves = model.tree()
    try:
        neurons = active.read_chain(model.chain)
    except ConfigError:
        total = sum(leaf.nbytes for leaf in leaves.values())
        return tuple((ratio, round(ratio * total)) for ratio in ratios)
    return tuple(
        (ratio, BYTES * active.count_parameters(neurons.index(active.first_neurons(neurons.hidden, ratio)), leaves))
        for ratio in ratios
    )
