"""Stochastic gradient descent: the step of `torch.optim.SGD`, to the bit, in the few lines that it takes.

    g <- grad + decay * w
    v <- momentum * v + g       at the first step v <- g
    w <- w - rate * v

or, as Nesterov has it, w <- w - rate * (g + momentum * v),

where decay, momentum and rate are those of `Hyper`, and grad may first be shortened to a norm.

The first use of torch's own imports a compiler, 1.2 seconds of CPU and 74 MB of a trainer's memory on an AMD EPYC, and
every step asks whether it is hooked, profiled or compiled: of a small network, four times the cost of the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shared.protocol.messages import Hyper
from shared.tensors.tree import Tree

TINY = 1e-6
"""Keeps the division by a norm from being one by zero, as `torch.nn.utils.clip_grad_norm_` does."""


def shorten_gradients(weights: Sequence[tuple[str, Tensor]], most: float) -> None:
    """Shorten the gradient of all weights together, in place, to a norm of `most` at the most."""
    gradients = [weight.grad for _, weight in weights if weight.grad is not None]
    if gradients:
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(one) for one in gradients]))
        share = (most / (norm + TINY)).clamp_max(1.0)
        for one in gradients:
            one.mul_(share)


@torch.no_grad()
def descend(
    weights: Iterable[tuple[str, Tensor]],
    momenta: Tree,
    hyper: Hyper,
    *,
    nesterov: bool = False,
    clip: float = math.inf,
) -> None:
    """Take a step along the gradients, and use these up: g + decay * w into the momentum, and along that.

    Args:
        weights: Parameters by name, changed in place; those without a gradient stay as they are.
        momenta: Of each parameter, kept from step to step; empty before the first.
        hyper: Learning rate, momentum, weight decay.
        nesterov: Whether the step looks ahead along the momentum.
        clip: The largest norm of the gradient of all together, before decay.
    """
    if clip < math.inf:
        weights = [*weights]
        shorten_gradients(weights, clip)
    for name, weight in weights:
        if (change := weight.grad) is None:
            continue
        weight.grad = None
        if hyper.weight_decay:
            change.add_(weight, alpha=hyper.weight_decay)
        if hyper.momentum:
            if name in momenta:
                flow = momenta[name].mul_(hyper.momentum).add_(change)
            else:
                flow = change.clone() if nesterov else change
            momenta[name] = flow
            change = change.add_(flow, alpha=hyper.momentum) if nesterov else flow
        weight.add_(change, alpha=-hyper.learning_rate)
