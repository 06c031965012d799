"""FedMP: devices keep the neurons whose weights are the largest by absolute sum.

Jiang, Xu, Xu, Wang, Qiao, Zhao. FedMP: Federated Learning through Adaptive Model Pruning in Heterogeneous Edge
Computing. ICDE 2022.
https://doi.org/10.1109/ICDE53745.2022.00062

    a neuron matters by |w_i|_1, w_i being the weights that come into it

As FedSPU's authors compare with it: see `shared.algorithms.subnetwork.ranked_pruning`. The original chooses ratios by a multi-armed bandit
and gives devices back what they have pruned (R2SP).
"""

from __future__ import annotations

from shared.algorithms.base import Algorithm
from shared.algorithms.early_stopping import Stopping
from shared.algorithms.subnetwork.ranked_pruning import ranked
from shared.algorithms.subnetwork.ranking import weight_l1


def fedmp(keep: float = 1.0, *, early_stopping: bool = False, share: float = 0.7, min_alive: int = 1) -> Algorithm:
    """Build the algorithm; for its options see `fedspu`."""
    return ranked(weight_l1, Stopping(early_stopping, share), keep=keep, min_alive=min_alive)
