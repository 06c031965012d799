"""ResNet-20 for small images.

K. He, X. Zhang, S. Ren, J. Sun. Deep Residual Learning for Image Recognition. CVPR 2016.
https://arxiv.org/abs/1512.03385, section 4.2: three stages of blocks of two convolutions, with shortcuts without
parameters (option A): 269,722 parameters in all.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from shared.models.base import Model
from shared.models.kaiming import kaiming

BLOCKS = 3
"""Blocks per stage: 3 stages x 3 blocks x 2 convolutions, the first convolution and the linear layer are 20 layers."""
WIDTHS = (1, 2, 4)
SIDE = 32


class Block(nn.Module):
    """Two convolutions with a shortcut, which skips pixels where the block shrinks and pads channels with zeros."""

    def __init__(self, channels: int, wide: int, stride: int = 1) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(channels, wide, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU(),
            nn.Conv2d(wide, wide, 3, padding=1, bias=False),
            nn.BatchNorm2d(wide),
        )
        self._stride, self._before = stride, (wide - channels) // 2
        self._after = wide - channels - self._before

    def forward(self, inputs: Tensor) -> Tensor:
        """Return outputs of shape (N, wide, height / stride, width / stride), rounded up."""
        strided = inputs[:, :, :: self._stride, :: self._stride]
        shortcut = functional.pad(strided, (0, 0, 0, 0, self._before, self._after))
        return functional.relu(self.branch(inputs) + shortcut)


def resnet20(channels: int = 3, width: int = 16, classes: int = 10) -> Model:
    """Build the model; it can be cut behind each stage, the last time behind the mean over the image.

    Args:
        channels: Channels of the input, of shape (N, channels, height, width).
        width: Channels of the first stage; the next ones have twice and four times as many.
        classes: Outputs, of shape (N, classes).
    """
    layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    cuts: dict[int, int] = {}
    count, in_channels = 1, width
    for stage, times in enumerate(WIDTHS):
        out_channels = times * width
        layers += [
            Block(in_channels, out_channels, stride=2 if stage else 1),
            *(Block(out_channels, out_channels) for _ in range(BLOCKS - 1)),
        ]
        if stage == len(WIDTHS) - 1:
            layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        count += 2 * BLOCKS
        cuts[count], in_channels = len(layers), out_channels
    layers.append(nn.Linear(in_channels, classes))
    return Model(kaiming(nn.Sequential(*layers)), cuts, example=(channels, SIDE, SIDE), he_normal=True)
