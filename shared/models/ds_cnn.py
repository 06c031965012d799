"""DS-CNN: depthwise separable convolutions for keyword spotting.

Y. Zhang, N. Suda, L. Lai, V. Chandra. Hello Edge: Keyword Spotting on Microcontrollers. 2017.
https://arxiv.org/abs/1711.07128: the small network by default, 23,180 parameters; width 172 and 276 are about those of
the larger ones.
"""

from __future__ import annotations

from torch import nn

from shared.models.base import Model
from shared.models.kaiming import kaiming

KERNEL, STRIDE, MARGIN = (10, 4), (2, 2), (5, 1)
"""First convolution over (frames, coefficients), with the output size of padding SAME: 49 x 10 shrinks to 25 x 5."""


def ds_cnn(
    channels: int = 1, frames: int = 49, coefficients: int = 10, width: int = 64, blocks: int = 4, classes: int = 12
) -> Model:
    """Build the model; it can be cut behind the first convolution and behind each block.

    Args:
        channels: Channels of the input, of shape (N, channels, frames, coefficients).
        frames: Frames of the declared example, such as 49 of a second.
        coefficients: Mel coefficients or bands of a frame, at least 2.
        width: Channels of every convolution.
        blocks: Blocks of a depthwise and a pointwise convolution.
        classes: Outputs, of shape (N, classes).
    """
    if width < 1 or blocks < 0 or frames < 1 or coefficients < KERNEL[1] - 2 * MARGIN[1]:
        raise ValueError("width and frames must be at least 1, blocks 0, coefficients 2")
    layers: list[nn.Module] = [
        *(nn.Conv2d(channels, width, KERNEL, STRIDE, MARGIN, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
    ]
    cuts = {1: len(layers)}
    for block in range(1, blocks + 1):
        layers += [
            *(nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
        ]
        cuts[1 + 2 * block] = len(layers)
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)]
    chain = kaiming(nn.Sequential(*layers))
    return Model(chain, cuts, example=(channels, frames, coefficients), he_normal=True)
