"""Small U-Net, and the Dice loss that suits thin defects."""

import torch
from torch import Tensor, nn

CLASSES = 3


def convolve(inputs: int, outputs: int) -> nn.Sequential:
    """Return two convolutions with normalisation."""
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.GroupNorm(4, outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Encoder and decoder with two levels and skip connections."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.ModuleList([convolve(1, width), convolve(width, 2 * width)])
        self.bottom = convolve(2 * width, 4 * width)
        self.up = nn.ModuleList([convolve(6 * width, 2 * width), convolve(3 * width, width)])
        self.pool, self.enlarge = nn.MaxPool2d(2), nn.Upsample(scale_factor=2, mode="nearest")
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (batch, classes, height, width)."""
        first = self.down[0](images)
        second = self.down[1](self.pool(first))
        features = self.bottom(self.pool(second))
        for level, skipped in zip(self.up, (second, first), strict=True):
            features = level(torch.cat([self.enlarge(features), skipped], 1))
        logits: Tensor = self.head(features)
        return logits


def build(width: int = 8) -> nn.Module:
    """Return the network."""
    return UNet(width)


def dice_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return 1 - Dice of each image, mean over the classes.

    Args:
        outputs: Logits, (batch, classes, height, width).
        targets: Class of each pixel, (batch, height, width).
    """
    shares = outputs.softmax(1)
    masks = nn.functional.one_hot(targets, CLASSES).movedim(3, 1)
    both, either = (shares * masks).sum((2, 3)), (shares + masks).sum((2, 3))
    return 1 - ((2 * both + 1) / (either + 1)).mean(1)
