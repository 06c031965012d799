"""Multilayer perceptron with one hidden layer, for vectors and flattened images."""

from __future__ import annotations

from torch import nn

from shared.models.base import Model


def mlp(features: int = 64, hidden: int = 32, classes: int = 10) -> Model:
    """Build two linear layers; inputs of shape (N, features) or any shape that flattens to it.

    Args:
        features: Numbers of one input.
        hidden: Features of the hidden layer.
        classes: Outputs, of shape (N, classes).
    """
    layers = nn.Sequential(nn.Flatten(), nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))
    return Model(layers, {1: 3}, example=(features,))
