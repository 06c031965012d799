"""Hermes: devices keep the neurons whose weights are the largest, and average where their parts overlap.

Li, Sun, Li, Pu, Li, Chen. Hermes: An Efficient Federated Learning Framework for Heterogeneous Mobile Clients. MobiCom
2021.
https://doi.org/10.1145/3447993.3483278

    a neuron matters by |w_i|_2, w_i being the weights that come into it

As FedSPU's authors compare with it: see `shared.algorithms.subnetwork.ranked_pruning`. The original prunes step by step, towards a target,
by group-lasso training.
"""

from __future__ import annotations

from shared.algorithms.base import Algorithm
from shared.algorithms.early_stopping import Stopping
from shared.algorithms.subnetwork.ranked_pruning import ranked
from shared.algorithms.subnetwork.ranking import weight_l2


def hermes(keep: float = 1.0, *, early_stopping: bool = False, share: float = 0.7, min_alive: int = 1) -> Algorithm:
    """Build the algorithm; for its options see `fedspu`."""
    return ranked(weight_l2, Stopping(early_stopping, share), keep=keep, min_alive=min_alive)
