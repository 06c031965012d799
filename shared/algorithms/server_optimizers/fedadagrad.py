"""FedAdagrad: FedAvg with Adagrad at the server.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan. Adaptive Federated Optimization. ICLR 2021, algorithm 2.
https://arxiv.org/abs/2003.00295

    m <- beta1 * m + (1 - beta1) * d                   d: mean change of the round, m = 0 before the first
    v <- v + d^2                                       v = tau^2 before the first round
    w <- w + rate * m / (sqrt(v) + tau)
"""

from __future__ import annotations

from torch import Tensor

from shared.algorithms.base import Algorithm
from shared.algorithms.server_optimizers.server_step import adaptive_optimizer


def fedadagrad(
    *, server_learning_rate: float = 0.1, beta1: float = 0.0, tau: float = 0.001, mu: float = 0.0
) -> Algorithm:
    """Build the algorithm; its server state has two moments beside each trained parameter.

    Args:
        server_learning_rate: Step size of the server, above 0.
        beta1: Decay of the mean of changes, in [0, 1).
        tau: Adaptivity, above 0, in the unit of a round's change of a parameter: the smaller, the more equal are the
            steps of all parameters.
        mu: Weight of FedProx's proximal term in the local loss, >= 0.

    Raises:
        ValueError: An option is out of range.
    """

    def second_moment(before: Tensor, squares: Tensor) -> Tensor:
        return before + squares

    rates = {"server_learning_rate": server_learning_rate, "beta1": beta1, "tau": tau}
    return adaptive_optimizer(second_moment, mu, **rates)
