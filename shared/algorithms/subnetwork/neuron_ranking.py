"""Neuron ranking: merit of neurons, and each layer's strongest ones.

A hidden layer's weights have the shape (n, ...): a row holds the incoming weights of one neuron, without its bias.

Z. Niu, H. Dong, A. K. Qin: FedSPU, which compares these rankings. https://arxiv.org/abs/2403.11464
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from torch import Tensor

from shared.subnetworks.neurons import count_active

Merit: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(weights, their gradient) of shape (n, ...) -> merit of each neuron, of shape (n,)."""


def weight_l2(weights: Tensor, _gradient: Tensor) -> Tensor:
    """Return the Euclidean norm of each neuron's incoming weights."""
    return weights.flatten(1).square().sum(1).sqrt()


def weight_l1(weights: Tensor, _gradient: Tensor) -> Tensor:
    """Return the absolute sum of each neuron's incoming weights."""
    return weights.flatten(1).abs().sum(1)


def gradient_l2(_weights: Tensor, gradient: Tensor) -> Tensor:
    """Return the Euclidean norm of the gradient of each neuron's incoming weights."""
    return gradient.flatten(1).square().sum(1).sqrt()


def select_strongest(merits: Mapping[str, Tensor], keep: float) -> dict[str, Tensor]:
    """Return the floor(keep n) neurons of each layer with the highest merit, at least one; of equal ones the first.

    Args:
        merits: Of shape (n,), by name of a hidden layer.
        keep: Share of each layer's neurons, above zero.
    """
    return {
        name: merit.argsort(descending=True, stable=True)[: count_active(len(merit), keep)].sort().values
        for name, merit in merits.items()
    }
