"""PruneFL: devices keep the neurons with the largest gradients.

Jiang, Wang, Valls, Ko, Lee, Leung, Tassiulas. Model Pruning Enables Efficient Federated Learning on Edge Devices. IEEE
Transactions on Neural Networks and Learning Systems, 2022.
https://arxiv.org/abs/1909.12326

    a neuron matters by |sum_b g_ib|_2, over the batches b of an epoch

where g_i is the gradient of the weights that come into it. As FedSPU's authors compare with it: see
`shared.algorithms.subnetwork.ranked_pruning`. The original prunes single weights by one mask for all devices, chosen by squared gradients
against time and reconfigured every fifty rounds.
"""

from __future__ import annotations

from shared.algorithms.base import Algorithm
from shared.algorithms.early_stopping import Stopping
from shared.algorithms.subnetwork.ranked_pruning import ranked
from shared.algorithms.subnetwork.ranking import gradient_l2


def prunefl(keep: float = 1.0, *, early_stopping: bool = False, share: float = 0.7, min_alive: int = 1) -> Algorithm:
    """Build the algorithm; for its options see `fedspu`."""
    return ranked(gradient_l2, Stopping(early_stopping, share), keep=keep, min_alive=min_alive)
