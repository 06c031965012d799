"""FedAvg with a server optimizer: the devices' mean change is a pseudo-gradient.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan. Adaptive Federated Optimization. ICLR 2021.
https://arxiv.org/abs/2003.00295

    d = sum_k (n_k / n) (w_k - w)                  w_k: after local training from w on device k's n_k examples
    m, v <- moments of d                           one value per parameter, in the server's state
    w <- w + rate * m / (sqrt(v) + tau)

Parameters that are trained are adapted. Buffers, such as BatchNorm's running statistics, and frozen parameters move by
the mean change itself: a statistic is no coordinate of the objective, and momentum would take a variance below zero.

Between the servers of several sites, only networks are averaged: the moments describe the pseudo-gradients of a site's
own devices, and stay there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from shared.algorithms.base import Algorithm
from shared.algorithms.fedavg import fedavg
from shared.algorithms.fedprox import fedprox
from shared.models.base import Model
from shared.tensors import tree
from shared.tensors.tree import Mean, State, Tree

FIRST, SECOND = "first/", "second/"
"""Prefixes of the moments' leaves, before the name of the parameter."""

Moments: TypeAlias = Mapping[str, Tensor]
"""Moments of one parameter, by prefix."""
Step: TypeAlias = Callable[[Moments, Tensor], tuple[Moments, Tensor]]
"""(moments, mean change d) -> (next moments, change of the parameter); what it is given stays as it is."""


def server_optimizer(initial: Mapping[str, float], step: Step, mu: float) -> Algorithm:
    """Build FedAvg with another step of the server.

    Args:
        initial: Value of each moment before the first round, by prefix.
        mu: Weight of FedProx's proximal term in the local loss; 0 for none.

    Raises:
        ValueError: `mu` is out of range.
    """
    averaged = fedprox(mu) if mu else fedavg()

    def init(model: Model, seed: int) -> State:
        state, moments = averaged.init(model, seed), Tree()
        for name, weight in model.layers.named_parameters():
            if weight.requires_grad:
                moments |= {prefix + name: _full_like(weight, value) for prefix, value in initial.items()}
        return State({**state.tree, **moments}, state.facts)

    def aggregate(state: State, mean: Mean) -> State:
        changes, next_moments = tree.finish_mean(mean), Tree()
        for name, change in changes.items():
            if moments := {prefix: state.tree[prefix + name] for prefix in initial if prefix + name in state.tree}:
                after, changes[name] = step(moments, change)
                next_moments |= {prefix + name: moment for prefix, moment in after.items()}
        return State({**tree.add(state.tree, changes), **next_moments}, state.facts)

    return replace(averaged, init=init, aggregate=aggregate)


def _full_like(weight: Tensor, value: float) -> Tensor:
    """Return a moment; means are of 32 bits at least, so moments are too."""
    return torch.full_like(weight.detach(), value, dtype=torch.promote_types(weight.dtype, torch.float32))


def adaptive_optimizer(
    second_moment: Callable[[Tensor, Tensor], Tensor],
    mu: float,
    *,
    server_learning_rate: float,
    beta1: float,
    tau: float,
) -> Algorithm:
    """Build FedAdagrad, FedYogi or FedAdam, which differ in the second moment; for the options see `fedadam`.

    Args:
        second_moment: (v, d * d) -> the next v.

    Raises:
        ValueError: An option is out of range.
    """
    require_options(server_learning_rate=server_learning_rate, beta1=beta1, tau=tau)

    def step(moments: Moments, change: Tensor) -> tuple[Moments, Tensor]:
        first = moments[FIRST] * beta1 + change * (1 - beta1)
        second = second_moment(moments[SECOND], change * change)
        return {FIRST: first, SECOND: second}, first / (second.sqrt() + tau) * server_learning_rate

    return server_optimizer({FIRST: 0.0, SECOND: tau * tau}, step, mu)


def require_options(**options: float) -> None:
    """Refuse options out of range: rates and tau above zero, decays at least 0 and below 1.

    Raises:
        ValueError: An option is out of range.
    """
    for name, value in options.items():
        if name in ("server_momentum", "beta1", "beta2"):
            if not 0 <= value < 1:
                raise ValueError(f"{name} is {value}, it must be at least 0 and below 1")
        elif not 0 < value < math.inf:
            raise ValueError(f"{name} is {value}, it must be above 0 and finite")
