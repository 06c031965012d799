"""Two convolutions and two linear layers: the small network of the demo and of MNIST-sized images."""

from __future__ import annotations

from torch import nn

from shared.models.base import Model


def cnn(channels: int = 1, side: int = 28, width: int = 16, hidden: int = 64, classes: int = 10) -> Model:
    """Build the model.

    Args:
        channels: Of the input, of shape (N, channels, side, side).
        side: Height and width of the input, a multiple of 4.
        width: Channels after the first convolution; twice as many after the second.
        hidden: Features of the first linear layer.
        classes: Outputs, of shape (N, classes).
    """
    layers = nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * (side // 4) ** 2, hidden),
        nn.ReLU(),
        nn.Linear(hidden, classes),
    )
    return Model(layers, cuts=(3, 6, 9))
