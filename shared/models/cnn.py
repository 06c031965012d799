"""Small 2-D CNN, of the demo and of MNIST-sized images."""

from __future__ import annotations

from torch import nn

from shared.models.base import Model


def cnn(
    channels: int = 1, side: int = 28, width: int = 16, hidden: int = 64, classes: int = 10, *, kernel: int = 3
) -> Model:
    """Build two convolutions and two linear layers.

    With kernels of 5, a width of 32 and 2048 hidden features it is LEAF's network for FEMNIST.

    Args:
        channels: Channels of the input, of shape (N, channels, side, side).
        side: Height and width of the input, a multiple of 4.
        width: Channels after the first convolution; twice as many after the second.
        hidden: Features of the first linear layer.
        classes: Outputs, of shape (N, classes).
        kernel: Height and width of the convolutions' kernels, odd.
    """
    if kernel % 2 == 0:
        raise ValueError(f"kernel must be odd, not {kernel}")
    margin = kernel // 2
    layers = nn.Sequential(
        nn.Conv2d(channels, width, kernel, padding=margin),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, kernel, padding=margin),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * width * (side // 4) ** 2, hidden),
        nn.ReLU(),
        nn.Linear(hidden, classes),
    )
    return Model(layers, {1: 3, 2: 6, 3: 9}, example=(channels, side, side))
