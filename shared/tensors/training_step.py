"""Steps of local training: clip the gradients, then SGD, Adam or AdamW, bit for bit those of `torch.optim`.

SGD:
    g <- grad + decay * w
    v <- momentum * v + g       at the first step v <- g
    w <- w - rate * v
or, with Nesterov momentum, w <- w - rate * (g + momentum * v).

Adam: Kingma, Ba. Adam: A Method for Stochastic Optimization. ICLR 2015. https://arxiv.org/abs/1412.6980
AdamW: Loshchilov, Hutter. Decoupled Weight Decay Regularization. ICLR 2019. https://arxiv.org/abs/1711.05101
    Adam: g <- grad + decay * w;  AdamW: w <- w - rate * decay * w
    m <- beta1 * m + (1 - beta1) * g
    v <- beta2 * v + (1 - beta2) * g^2
    w <- w - rate / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)       t: steps of this parameter so far

The first use of torch's optimizers imports a compiler, 1.2 seconds of CPU and 74 MB of a trainer's memory on an AMD
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
FIRST, SECOND, STEPS = "first/", "second/", "steps/"
"""Prefixes of a parameter's moments and of its number of steps, a scalar on the CPU."""


def take_step(weights: Sequence[tuple[str, Tensor]], memory: Tree, hyper: Hyper) -> None:
    """Take the step that the hyperparameters describe; the gradients are consumed.

    Args:
        weights: Parameters by name, changed in place; those without a gradient stay unchanged.
        memory: Momentum or moments, updated at every step; empty before the first.
    """
    options = hyper.step
    if options.clip_norm:
        clip_gradients(weights, options.clip_norm)
    if options.optimizer == "sgd":
        descend(weights, memory, hyper)
    else:
        adam_step(weights, memory, hyper)


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


@torch.no_grad()
def adam_step(weights: Iterable[tuple[str, Tensor]], moments: Tree, hyper: Hyper) -> None:
    """Take a step; the gradients are consumed.

    Args:
        weights: Parameters by name, changed in place; those without a gradient stay unchanged.
        moments: Moments and numbers of steps, updated in place; empty before the first step.
    """
    options, rate, decay = hyper.step, hyper.learning_rate, hyper.weight_decay
    for name, weight in weights:
        if (gradient := weight.grad) is None:
            continue
        weight.grad = None
        if FIRST + name not in moments:
            moments[STEPS + name] = torch.zeros(())
            moments[FIRST + name], moments[SECOND + name] = torch.zeros_like(weight), torch.zeros_like(weight)
        first, second = moments[FIRST + name], moments[SECOND + name]
        count = moments[STEPS + name].add_(1).item()
        if decay and options.optimizer == "adamw":
            weight.mul_(1 - rate * decay)
        elif decay:
            gradient.add_(weight, alpha=decay)
        first.lerp_(gradient, 1 - options.beta1)
        second.mul_(options.beta2).addcmul_(gradient, gradient, value=1 - options.beta2)
        spread = (second.sqrt() / (1 - options.beta2**count) ** 0.5).add_(options.eps)
        weight.addcdiv_(first, spread, value=-rate / (1 - options.beta1**count))
