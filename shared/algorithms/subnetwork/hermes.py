"""Hermes: prune to the neurons with the largest weights by Euclidean norm.

Li, Sun, Li, Pu, Li, Chen. Hermes: An Efficient Federated Learning Framework for Heterogeneous Mobile Clients. MobiCom
2021. https://doi.org/10.1145/3447993.3483278

    merit of a neuron: |w_i|_2, w_i being its incoming weights

Implemented as in the comparison by FedSPU's authors, see `ranked_pruning`. The original prunes step by step towards a
target, by group-lasso training.
"""

from __future__ import annotations

from shared.algorithms.base import Algorithm
from shared.algorithms.early_stopping import Stopping, stops_early
from shared.algorithms.subnetwork.neuron_ranking import weight_l2
from shared.algorithms.subnetwork.ranked_pruning import build_ranked


@stops_early
def hermes(keep: float = 1.0, *, stopping: Stopping) -> Algorithm:
    """Build the algorithm; for its options see `fedspu`."""
    return build_ranked(weight_l2, stopping, keep=keep)
