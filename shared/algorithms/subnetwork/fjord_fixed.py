"""FjORD with fixed widths: the simplified baseline of the FedSPU paper.

Niu, Dong, Qin, AAAI 2025, https://arxiv.org/abs/2403.11464, simplify FjORD (see `fjord`): no width is drawn, there is
no distillation, and no device stores anything.

    S_l = {1, ..., floor(p_k n_l)}

It is random dropout with this choice of neurons. A device uses the part of the common network that it received last.
"""

from __future__ import annotations

from shared.algorithms.base import Algorithm
from shared.algorithms.early_stopping import Stopping, stops_early
from shared.algorithms.subnetwork.random_dropout import build_dropout
from shared.algorithms.subnetwork.server_half import keep_share, stored_chain
from shared.protocol.messages import Assignment
from shared.subnetworks.neurons import Active, first_neurons
from shared.tensors.tree import State


@stops_early
def fjord_fixed(keep: float = 1.0, *, stopping: Stopping) -> Algorithm:
    """Build the algorithm; for its options see `fedspu`."""
    return build_dropout(select_first_neurons, stopping, keep=keep)


def select_first_neurons(state: State, _device: str, assignment: Assignment) -> Active:
    """Return the first neurons of every layer, as many as the device's share."""
    return first_neurons(stored_chain(state.facts).hidden, keep_share(assignment))
