"""FedProx: FedAvg with a proximal term towards the round's initial parameters.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith. Federated Optimization in Heterogeneous Networks. MLSys 2020.
https://arxiv.org/abs/1812.06127

    local loss + mu/2 * |w - w_start|^2, that is, mu * (w - w_start) on every gradient
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import nn

from shared.algorithms.base import Algorithm
from shared.algorithms.fedavg import LocalSgd, fedavg
from shared.tensors.tree import Tree


def fedprox(mu: float = 0.01) -> Algorithm:
    """Build the algorithm.

    Args:
        mu: Weight of the proximal term, >= 0; 0 gives FedAvg.

    Raises:
        ValueError: `mu` is negative, NaN or infinite.
    """
    if not 0 <= mu < math.inf:
        raise ValueError(f"mu is {mu}, it must be >= 0 and finite")

    @torch.no_grad()
    def pull(layers: nn.Module, start: Tree) -> None:
        for name, weight in layers.named_parameters():
            if weight.grad is not None:
                weight.grad.add_(weight - start[name], alpha=mu)

    return replace(fedavg(), local=LocalSgd(pull))
