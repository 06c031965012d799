"""SGD step: identical to `torch.optim.SGD` bit for bit, without its overhead.

    g <- grad + decay * w
    v <- momentum * v + g       at the first step v <- g
    w <- w - rate * v

or, with Nesterov momentum, w <- w - rate * (g + momentum * v),

where decay, momentum and rate are those of `Hyper`, and grad may first be clipped to a norm.

The first use of torch's optimizer imports a compiler, 1.2 seconds of CPU and 74 MB of a trainer's memory on an AMD
EPYC, and every step checks for hooks, profiling and compilation: for a small network, four times the cost of the
arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shared.protocol.messages import Hyper
from shared.tensors.tree import Tree

TINY = 1e-6
"""Prevents division by a norm of zero, as in `torch.nn.utils.clip_grad_norm_`."""


def clip_gradients(weights: Sequence[tuple[str, Tensor]], most: float) -> None:
    """Scale the gradients of all weights together, in place, to a norm of at most `most`."""
    gradients = [weight.grad for _, weight in weights if weight.grad is not None]
    if gradients:
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]))
        share = (most / (norm + TINY)).clamp_max(1.0)
        for gradient in gradients:
            gradient.mul_(share)


@torch.no_grad()
def descend(
    weights: Iterable[tuple[str, Tensor]],
    momenta: Tree,
    hyper: Hyper,
    *,
    nesterov: bool = False,
    clip: float = math.inf,
) -> None:
    """Take a step along the momentum, updated with g + decay * w; the gradients are consumed.

    Args:
        weights: Parameters by name, changed in place; those without a gradient stay unchanged.
        momenta: Momentum by parameter name, updated at every step; empty before the first.
        nesterov: Whether momentum is Nesterov's.
        clip: The largest norm of all gradients together, before decay.
    """
    if clip < math.inf:
        weights = [*weights]
        clip_gradients(weights, clip)
    for name, weight in weights:
        if (change := weight.grad) is None:
            continue
        weight.grad = None
        if hyper.weight_decay:
            change.add_(weight, alpha=hyper.weight_decay)
        if hyper.momentum:
            if name in momenta:
                momentum = momenta[name].mul_(hyper.momentum).add_(change)
            else:
                momentum = change.clone() if nesterov else change
            momenta[name] = momentum
            change = change.add_(momentum, alpha=hyper.momentum) if nesterov else momentum
        weight.add_(change, alpha=-hyper.learning_rate)
