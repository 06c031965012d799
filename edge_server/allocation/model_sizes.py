"""Model sizes for allocators: weights, and bytes of partial updates."""

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
from shared.tensors.tree import State

BYTES = 4
MATRIX = 2
"""Minimum dimensions of a leaf with prunable weights; biases are never pruned."""


def measure_model(algorithm: Algorithm, model: Model, state: State) -> Sizes:
    """Measure a model as broadcast by an algorithm; meta tensors suffice."""
    leaves = model.tree()
    assignment = Assignment(seed=0, hyper=Hyper())
    down = algorithm.broadcast(state, "", assignment)
    weights = sum(parameter.numel() for parameter in model.layers.parameters())
    counted = sum(leaf.numel() for key, leaf in down.items() if key in leaves and leaf.ndim >= MATRIX)
    declared = state.facts.get("global_weights", counted)
    shared = declared if isinstance(declared, int) else counted
    dense = sum(leaf.nbytes for key, leaf in down.items() if key in leaves and leaf.ndim < MATRIX)
    return Sizes(weights, min(shared, weights), sum(leaf.nbytes for leaf in leaves.values()), dense, state.facts)


def sent_bytes(codec: Spec, model: Model, shares: list[float]) -> tuple[tuple[float, int], ...]:
    """Return (share, bytes) of updates that send a share of their change; only `topk` sends less than all.

    Args:
        model: Meta tensors suffice.
        shares: In ascending order.
    """
    leaves = model.tree()
    total = sum(leaf.nbytes for leaf in leaves.values())
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
