"""Train a part of a network: frozen leaves and low-rank adapters.

E. J. Hu et al. LoRA: Low-Rank Adaptation of Large Language Models. ICLR 2022. https://arxiv.org/abs/2106.09685
"""

from __future__ import annotations

from dataclasses import replace

from shared.algorithms.base import Algorithm, Mixing, network_leaves
from shared.models.adaptation import merge
from shared.protocol.adaptation import Lora
from shared.protocol.messages import Assignment
from shared.tensors.tree import State, Tree


def restrict(algorithm: Algorithm, frozen: frozenset[str], lora: Lora | None) -> Algorithm:
    """Return a method whose devices receive and send the trained leaves alone.

    The frozen leaves are in its state, and devices get them once: `frozen_leaves`.

    Args:
        algorithm: Its `trains_parts` is true.
    """

    def broadcast(state: State, device: str, assignment: Assignment) -> Tree:
        sent = algorithm.broadcast(state, device, assignment)
        return {name: leaf for name, leaf in sent.items() if name not in frozen}

    def merged_parameters(state: State) -> Tree:
        tree = algorithm.evaluated(state) if algorithm.evaluated else state.tree
        return merge(network_leaves(tree), lora) if lora else tree

    mixing = _mix_trained(algorithm.mixing, frozen) if algorithm.mixing else None
    evaluated = merged_parameters if lora else algorithm.evaluated
    return replace(algorithm, broadcast=broadcast, evaluated=evaluated, mixing=mixing)


def _mix_trained(mixing: Mixing, frozen: frozenset[str]) -> Mixing:
    """Return a mixing without the frozen leaves, which are equal on all sites."""

    def shared_tree(state: State) -> Tree:
        return {name: leaf for name, leaf in mixing.shared_tree(state).items() if name not in frozen}

    return Mixing(shared_tree, lambda state, mean: mixing.with_mean(state, {**frozen_leaves(state, frozen), **mean}))


def frozen_leaves(state: State, frozen: frozenset[str]) -> Tree:
    """Return the frozen leaves of a server state."""
    return {name: leaf for name, leaf in state.tree.items() if name in frozen}
