"""FedMP: prune to the neurons with the largest absolute sum of weights.

Jiang, Xu, Xu, Wang, Qiao, Zhao. FedMP: Federated Learning through Adaptive Model Pruning in Heterogeneous Edge
Computing. ICDE 2022. https://doi.org/10.1109/ICDE53745.2022.00062

    merit of a neuron: |w_i|_1, w_i being its incoming weights

Implemented as in the comparison by FedSPU's authors, see `ranked_pruning`. The original chooses the ratios by a
multi-armed bandit and restores pruned weights on the devices (R2SP).
"""

from __future__ import annotations

from shared.algorithms.base import Algorithm
from shared.algorithms.early_stopping import Stopping, stops_early
from shared.algorithms.subnetwork.neuron_ranking import weight_l1
from shared.algorithms.subnetwork.ranked_pruning import build_ranked


@stops_early
def fedmp(keep: float = 1.0, *, stopping: Stopping) -> Algorithm:
    """Build the algorithm; for its options see `fedspu`."""
    return build_ranked(weight_l1, stopping, keep=keep)
