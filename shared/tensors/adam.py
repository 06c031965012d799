"""Adam and AdamW steps, bit for bit those of `torch.optim`, without its overhead.

Kingma, Ba. Adam: A Method for Stochastic Optimization. ICLR 2015. https://arxiv.org/abs/1412.6980
Loshchilov, Hutter. Decoupled Weight Decay Regularization. ICLR 2019. https://arxiv.org/abs/1711.05101

    Adam: g <- grad + decay * w;  AdamW: w <- w - rate * decay * w
    m <- beta1 * m + (1 - beta1) * g
    v <- beta2 * v + (1 - beta2) * g^2
    w <- w - rate / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)       t: steps of this parameter so far

`shared.tensors.sgd` tells why torch's optimizers are not used.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from shared.protocol.messages import Hyper
from shared.tensors.tree import Tree

FIRST, SECOND, STEPS = "first/", "second/", "steps/"
"""Prefixes of a parameter's moments and of its number of steps, a scalar on the CPU."""


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
