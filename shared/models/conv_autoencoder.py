"""Convolutional autoencoder for images: anomalies are what it reconstructs badly.

J. Masci, U. Meier, D. Ciresan, J. Schmidhuber. Stacked Convolutional Auto-Encoders for Hierarchical Feature Extraction.
ICANN 2011. https://doi.org/10.1007/978-3-642-21735-7_7
"""

from __future__ import annotations

from torch import nn

from shared.models.base import Model

STRIDES = 4
"""Factor by which the code is smaller than the image, along each side."""


def conv_autoencoder(channels: int = 1, side: int = 32, width: int = 16, code: int = 4) -> Model:
    """Build two convolutions that halve the image, a code, and two that double it; outputs have the input's shape.

    Args:
        channels: Of an image of shape (channels, side, side).
        side: Pixels; a multiple of 4.
        width: Channels behind the first convolution; twice as many behind the second.
        code: Channels of the code, of (side / 4)² places.
    """
    if min(channels, side, width, code) < 1 or side % STRIDES:
        raise ValueError(f"channels, width and code must be at least 1, and side a multiple of {STRIDES}, not {side}")
    layers = nn.Sequential(
        *(nn.Conv2d(channels, width, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(2 * width, code, 1), nn.ReLU()),
        *(nn.ConvTranspose2d(code, width, 4, stride=2, padding=1), nn.ReLU()),
        nn.ConvTranspose2d(width, channels, 4, stride=2, padding=1),
    )
    return Model(layers, {1: 2, 2: 4, 3: 6, 4: 8}, example=(channels, side, side))
