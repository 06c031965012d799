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
"""Dimensions from which on a leaf holds weights that may be pruned; biases never are."""


def measure_model(algorithm: Algorithm, model: Model, state: State) -> Sizes:
    """Measure a model; no leaf needs storage.

    Args:
        algorithm: It says what goes down.
        model: A skeleton will do.
    """
    own = model.layers.state_dict()
    told = Assignment(seed=0, hyper=Hyper())
    down = algorithm.broadcast(state, "", told)
    weights = sum(one.numel() for one in model.layers.parameters())
    found = sum(leaf.numel() for key, leaf in down.items() if key in own and leaf.ndim >= MATRIX)
    said = state.facts.get("global_weights", found)
    shared = said if isinstance(said, int) else found
    dense = sum(leaf.nbytes for key, leaf in down.items() if key in own and leaf.ndim < MATRIX)
    return Sizes(weights, min(shared, weights), sum(leaf.nbytes for leaf in own.values()), dense, state.facts)


def sent_bytes(codec: Spec, model: Model, shares: list[float]) -> tuple[tuple[float, int], ...]:
    """Return the bytes of an update that sends each of some shares of its change; of most codecs that is all of it.

    Args:
        model: A skeleton will do.
        shares: In ascending order.
    """
    leaves = model.layers.state_dict()
    whole = sum(leaf.nbytes for leaf in leaves.values())
    if codec.name != "topk":
        return tuple((share, whole) for share in shares)
    exact = masked_entries.read_names(str(codec.options.get("exact", "")))
    floating = masked_entries.divisible_leaves(leaves, 0, exact)
    parted = [leaf for key, leaf in floating.items() if key.rpartition(".")[2] not in STATISTICS]
    count, rest = sum(leaf.numel() for leaf in parted), whole - sum(leaf.nbytes for leaf in parted)
    sizes = itertools.accumulate((rest + topk_bytes(count, share) for share in shares), max)
    return tuple(zip(shares, sizes, strict=True))


def update_bytes(model: Model, ratios: list[float]) -> tuple[tuple[float, int], ...]:
    """Return the bytes of an update that keeps each of some shares of every hidden layer's neurons.

    Where a model is no chain of layers, whose neurons could be told apart, bytes are taken to grow with the share.
    """
    own = model.layers.state_dict()
    try:
        neurons = active.read_chain(model.layers)
    except ConfigError:
        whole = sum(leaf.nbytes for leaf in own.values())
        return tuple((ratio, round(ratio * whole)) for ratio in ratios)
    return tuple(
        (ratio, BYTES * active.count_parameters(neurons.index(active.first_neurons(neurons.hidden, ratio)), own))
        for ratio in ratios
    )
