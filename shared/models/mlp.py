"""A perceptron with one hidden layer, for vectors and for images taken as vectors."""

from __future__ import annotations

from torch import nn

from shared.models.base import Model


def mlp(features: int = 64, hidden: int = 32, classes: int = 10) -> Model:
    """Build the model; inputs of shape (N, features) or any shape that flattens to it."""
    layers = nn.Sequential(nn.Flatten(), nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))
    return Model(layers, {1: 3}, example=(features,))
