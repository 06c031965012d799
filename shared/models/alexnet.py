"""AlexNet for small images: five convolutions, three linear layers, 35,855,178 parameters.

A. Krizhevsky, I. Sutskever, G. E. Hinton. ImageNet Classification with Deep Convolutional Neural Networks. NIPS 2012.
https://papers.nips.cc/paper/4824, with the channels and small kernels common in studies of CIFAR-10.
"""

from __future__ import annotations

from torch import nn

from shared.models.base import Model
from shared.models.kaiming import kaiming
from shared.tensors.feature_dropout import DrawnDropout

CHANNELS = (64, 192, 384, 256, 256)


def alexnet(
    *,
    channels: int = 3,
    side: int = 32,
    width: float = 1.0,
    hidden: int = 4096,
    dropout: float = 0.0,
    classes: int = 10,
) -> Model:
    """Build the model.

    Args:
        channels: Channels of the input, of shape (N, channels, side, side).
        side: Height and width of the input, at least 8.
        width: Share of the channels of every convolution.
        hidden: Features of the two hidden linear layers.
        dropout: Dropout rate before these layers in training.
        classes: Outputs, of shape (N, classes).
    """
    if not width > 0 or side < 2**3:
        raise ValueError("width must be above zero, side at least 8")
    a, b, c, d, e = (max(1, round(count * width)) for count in CHANNELS)
    flat = e * (side // 2**3) ** 2
    layers = nn.Sequential(
        *(nn.Conv2d(channels, a, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(b, c, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(c, d, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(d, e, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), _dropout(dropout), nn.Linear(flat, hidden), nn.ReLU()),
        *(_dropout(dropout), nn.Linear(hidden, hidden), nn.ReLU()),
        nn.Linear(hidden, classes),
    )
    return Model(
        kaiming(layers), {1: 3, 2: 6, 3: 8, 4: 10, 5: 13, 6: 17, 7: 20}, example=(channels, side, side), he_normal=True
    )


def _dropout(share: float) -> nn.Module:
    """Return a layer even for a rate of zero, so that parameters have the same names."""
    return DrawnDropout(share) if share else nn.Identity()
