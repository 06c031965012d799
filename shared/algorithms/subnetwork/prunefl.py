"""PruneFL: prune to the neurons with the largest gradients.

Jiang, Wang, Valls, Ko, Lee, Leung, Tassiulas. Model Pruning Enables Efficient Federated Learning on Edge Devices. IEEE
Transactions on Neural Networks and Learning Systems, 2022. https://arxiv.org/abs/1909.12326

    merit of a neuron: |sum_b g_ib|_2, over the batches b of an epoch

where g_i is the gradient of its incoming weights. Implemented as in the comparison by FedSPU's authors, see
`ranked_pruning`. The original prunes single weights by one mask for all devices, chosen by squared gradients against
time and updated every fifty rounds.
"""

from __future__ import annotations

from shared.algorithms.base import Algorithm
from shared.algorithms.early_stopping import Stopping, stops_early
from shared.algorithms.subnetwork.neuron_ranking import gradient_l2
from shared.algorithms.subnetwork.ranked_pruning import build_ranked


@stops_early
def prunefl(keep: float = 1.0, *, stopping: Stopping) -> Algorithm:
    """Build the algorithm; for its options see `fedspu`."""
    return build_ranked(gradient_l2, stopping, keep=keep)
