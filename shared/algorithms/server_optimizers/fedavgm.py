"""FedAvgM: FedAvg with momentum at the server.

Hsu, Qi, Brown. Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification. 2019.
https://arxiv.org/abs/1909.06335

    v <- beta * v + d          d: mean change of the round, v = 0 before the first
    w <- w + rate * v
"""

from __future__ import annotations

from torch import Tensor

from shared.algorithms.base import Algorithm
from shared.algorithms.server_optimizers.server_step import Moments, require_options, server_optimizer

VELOCITY = "velocity/"
"""Prefix of the momentum's leaves."""


def fedavgm(*, server_learning_rate: float = 1.0, server_momentum: float = 0.9, mu: float = 0.0) -> Algorithm:
    """Build the algorithm; its server state has a velocity beside each trained parameter.

    Args:
        server_learning_rate: Share of the velocity by which the model moves in a round, above 0.
        server_momentum: Beta, share of the velocity that stays for the next round, in [0, 1); 0 gives FedAvg.
        mu: Weight of FedProx's proximal term in the local loss, >= 0.

    Raises:
        ValueError: An option is out of range.
    """
    require_options(server_learning_rate=server_learning_rate, server_momentum=server_momentum)

    def step(moments: Moments, change: Tensor) -> tuple[Moments, Tensor]:
        velocity = moments[VELOCITY] * server_momentum + change
        return {VELOCITY: velocity}, velocity * server_learning_rate

    return server_optimizer({VELOCITY: 0.0}, step, mu)
