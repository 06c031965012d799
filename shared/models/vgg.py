"""VGG-13, VGG-16 and VGG-19 for small images, with one linear layer.

K. Simonyan, A. Zisserman. Very Deep Convolutional Networks for Large-Scale Image Recognition. ICLR 2015.
https://arxiv.org/abs/1409.1556, table 1, columns B, D and E. Convolutions are 3 x 3 with padding 1 and a bias; on
32 x 32 pixels and ten classes VGG-19 with BatchNorm has 20,040,522 parameters.
"""

from __future__ import annotations

from torch import nn

from shared.models.base import Model
from shared.models.kaiming import kaiming

DEPTHS = {13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
"""Convolutions in each block; a block ends with a pooling layer and a legal cut."""
CHANNELS = (64, 128, 256, 512, 512)
SIDE = 32


def vgg(depth: int, /, channels: int = 3, width: float = 1.0, norm: str = "batch", classes: int = 10) -> Model:
    """Build the model; the head gets the mean over the remaining image.

    Args:
        depth: 13, 16 or 19.
        channels: Channels of the input, of shape (N, channels, height, width); images of 32 x 32 shrink to one pixel.
            BatchNorm cannot train on a batch of one example that is smaller than 17 x 17.
        width: Share of the channels of every layer.
        norm: Layer behind every convolution: `batch` or `none`.
        classes: Outputs, of shape (N, classes).
    """
    if not width > 0:
        raise ValueError(f"width must be above zero, not {width}")
    layers: list[nn.Module] = []
    cuts: dict[int, int] = {}
    count, in_channels = 0, channels
    for convolutions, base_channels in zip(DEPTHS[depth], CHANNELS, strict=True):
        for _ in range(convolutions):
            out_channels = max(1, round(base_channels * width))
            layers += [nn.Conv2d(in_channels, out_channels, 3, padding=1), *_norm(norm, out_channels), nn.ReLU()]
            in_channels = out_channels
        layers.append(nn.MaxPool2d(2, ceil_mode=True))  # keeps an incomplete row of pixels
        count += convolutions
        cuts[count] = len(layers)
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(in_channels, classes)]
    return Model(kaiming(nn.Sequential(*layers)), cuts, example=(channels, SIDE, SIDE), he_normal=True)


def _norm(kind: str, channels: int) -> list[nn.Module]:
    match kind:
        case "batch":
            return [nn.BatchNorm2d(channels)]
        case "none":
            return []
    raise ValueError(f"norm must be batch or none, not {kind!r}")
