"""Table of loss functions by name: built-in ones and plugins."""

from __future__ import annotations

from collections.abc import Callable

from shared.objectives.losses import LossFunction, binary_cross_entropy, cross_entropy, dice, huber, mae, mse, quantile
from shared.registry import Registry

LOSSES: Registry[Callable[..., LossFunction]] = Registry(
    "loss",
    "losses",
    {
        "binary_cross_entropy": binary_cross_entropy,
        "cross_entropy": cross_entropy,
        "dice": dice,
        "huber": huber,
        "mae": mae,
        "mse": mse,
        "quantile": quantile,
    },
)
"""Builders of losses by name; a plugin is the loss itself, or its builder if the plan gives options."""
