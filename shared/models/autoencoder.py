"""Dense autoencoder: detects anomalies by their reconstruction error.

G. E. Hinton, R. R. Salakhutdinov. Reducing the Dimensionality of Data with Neural Networks. Science 313, 2006.
https://doi.org/10.1126/science.1127647
"""

from __future__ import annotations

import math

from torch import nn

from shared.models.base import Model


def autoencoder(features: int = 64, steps: int = 0, channels: int = 0, hidden: int = 32, code: int = 8) -> Model:
    """Build four linear layers; outputs have the shape of the inputs.

    Args:
        features: Numbers of one input of shape (N, features); the last axis of other shapes.
        steps: For inputs of shape (N, steps, features); 0: vectors.
        channels: For images of shape (N, channels, height, width), with the height in `steps`, the width in `features`;
            0 for other inputs.
        hidden: Features of the hidden layers before and behind the code.
        code: Features of the code, fewer than an input has.
    """
    example = (*(size for size in (channels, steps) if size), features)
    if min(*example, hidden, code) < 1:
        raise ValueError("features, hidden and code must be at least 1")
    flat = math.prod(example)
    layers = nn.Sequential(
        *(nn.Flatten(), nn.Linear(flat, hidden), nn.ReLU()),
        *(nn.Linear(hidden, code), nn.ReLU()),
        *(nn.Linear(code, hidden), nn.ReLU()),
        nn.Linear(hidden, flat),
        *([nn.Unflatten(1, example)] if len(example) > 1 else []),
    )
    return Model(layers, {1: 3, 2: 5, 3: 7}, example=example)
