"""Small U-Net: a class for every pixel.

O. Ronneberger, P. Fischer, T. Brox. U-Net: Convolutional Networks for Biomedical Image Segmentation. MICCAI 2015.
https://arxiv.org/abs/1505.04597; with BatchNorm, and padding, so that outputs are as large as inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shared.models.base import Model
from shared.models.kaiming import kaiming


class UNet(nn.Module):
    """Levels that halve the image, levels that double it, and a connection across each."""

    def __init__(self, channels: int, width: int, depth: int, classes: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(map(_convolve, [channels, *widths[:-2]], widths[:-1]))
        self.pool = nn.MaxPool2d(2)
        self.bottom = _convolve(widths[-2], widths[-1])
        upwards = range(depth - 1, -1, -1)
        self.grow = nn.ModuleList(nn.ConvTranspose2d(widths[at + 1], widths[at], 2, stride=2) for at in upwards)
        self.up = nn.ModuleList(_convolve(2 * widths[at], widths[at]) for at in upwards)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return outputs of shape (N, classes, H, W) for inputs of shape (N, channels, H, W)."""
        features, across = inputs, list[Tensor]()
        for level in self.down:
            features = level(features)
            across.append(features)
            features = self.pool(features)
        features = self.bottom(features)
        for grow, level in zip(self.grow, self.up, strict=True):
            features = level(torch.cat([across.pop(), grow(features)], 1))
        outputs: Tensor = self.head(features)
        return outputs


def _convolve(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
        *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
    )


def unet(channels: int = 3, side: int = 64, width: int = 16, depth: int = 3, classes: int = 2) -> Model:
    """Build the model. It is no chain of layers, so that methods that cut it or leave neurons out refuse it.

    Args:
        channels: Channels of the input, of shape (N, channels, height, width).
        side: Height and width of the declared example; any multiple of 2^depth is accepted.
        width: Channels of the first level; twice as many in each further one.
        depth: Times that the image is halved, at least 1.
        classes: Classes of a pixel: outputs of shape (N, classes, height, width).
    """
    if depth < 1 or width < 1:
        raise ValueError("depth and width must be at least 1")
    if side < 1 or side % 2**depth:
        raise ValueError(f"side is {side}; give a multiple of {2**depth}, since the image is halved {depth} times")
    return Model(kaiming(UNet(channels, width, depth, classes)), example=(channels, side, side), he_normal=True)
