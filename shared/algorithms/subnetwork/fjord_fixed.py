"""FjORD as FedSPU's authors compare with it: the first neurons of every layer, trained at that width alone.

Niu, Dong, Qin, AAAI 2025, https://arxiv.org/abs/2403.11464, simplify FjORD (see `shared.algorithms.subnetwork.fjord`): no width is
drawn, there is no distillation, and no device keeps anything.

    S_l = {1, ..., floor(p_k n_l)}

It is random dropout with that choice of neurons. A device uses the part of the common network that it was given last.
"""

from __future__ import annotations

from shared.algorithms.base import Algorithm
from shared.algorithms.early_stopping import Stopping
from shared.algorithms.subnetwork.random_dropout import dropout
from shared.algorithms.subnetwork.server_half import chain_of, keep_of
from shared.protocol.messages import Assignment
from shared.subnetworks.neurons import Active, ordered
from shared.tensors.tree import State


def fjord_fixed(
    keep: float = 1.0, *, early_stopping: bool = False, share: float = 0.7, min_alive: int = 1
) -> Algorithm:
    """Build the algorithm; for its options see `fedspu`."""
    return dropout(first, Stopping(early_stopping, share), keep=keep, min_alive=min_alive)


def first(state: State, assignment: Assignment) -> Active:
    """Return the first neurons of every layer, as many as a device's share of them is."""
    return ordered(chain_of(state.facts).hidden, keep_of(assignment))
