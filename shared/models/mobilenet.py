"""MobileNetV3-small: 2,542,856 parameters for the 1000 classes of ImageNet.

A. Howard et al. Searching for MobileNetV3. ICCV 2019. https://arxiv.org/abs/1905.02244, table 2. Parameters have the
names of torchvision's `mobilenet_v3_small`, so that its published weights can be loaded.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from shared.models.base import Model
from shared.models.kaiming import kaiming
from shared.tensors.feature_dropout import DrawnDropout

SIDE = 224
DIVISOR = 8
"""Channels are multiples of this."""
EPSILON = 1e-3
FIRST, EXPANSION, FEATURES = 16, 6, 1024
"""Channels of the first convolution, times more in the last one, and features before the classes."""
_norm = partial(nn.BatchNorm2d, eps=EPSILON)


class Bottleneck(NamedTuple):
    """Row of the paper's table."""

    kernel: int
    expanded: int
    out: int
    squeezes: bool
    is_hard: bool
    stride: int


BOTTLENECKS = (
    Bottleneck(3, 16, 16, squeezes=True, is_hard=False, stride=2),
    Bottleneck(3, 72, 24, squeezes=False, is_hard=False, stride=2),
    Bottleneck(3, 88, 24, squeezes=False, is_hard=False, stride=1),
    Bottleneck(5, 96, 40, squeezes=True, is_hard=True, stride=2),
    Bottleneck(5, 240, 40, squeezes=True, is_hard=True, stride=1),
    Bottleneck(5, 240, 40, squeezes=True, is_hard=True, stride=1),
    Bottleneck(5, 120, 48, squeezes=True, is_hard=True, stride=1),
    Bottleneck(5, 144, 48, squeezes=True, is_hard=True, stride=1),
    Bottleneck(5, 288, 96, squeezes=True, is_hard=True, stride=2),
    Bottleneck(5, 576, 96, squeezes=True, is_hard=True, stride=1),
    Bottleneck(5, 576, 96, squeezes=True, is_hard=True, stride=1),
)


class SqueezeExcitation(nn.Module):
    """Scale channels by a function of their means."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1, self.activation = nn.Conv2d(channels, squeezed, 1), nn.ReLU()
        self.fc2, self.scale_activation = nn.Conv2d(squeezed, channels, 1), nn.Hardsigmoid()

    def forward(self, inputs: Tensor) -> Tensor:
        """Return outputs of the inputs' shape."""
        scale = self.fc2(self.activation(self.fc1(self.avgpool(inputs))))
        outputs: Tensor = self.scale_activation(scale) * inputs
        return outputs


class InvertedResidual(nn.Module):
    """Expansion, depthwise convolution, squeeze and excitation, projection; with a shortcut where shapes are equal."""

    def __init__(self, channels: int, row: Bottleneck, *, width: float) -> None:
        super().__init__()
        expanded, out = _divisible(row.expanded * width), _divisible(row.out * width)
        activation = nn.Hardswish if row.is_hard else nn.ReLU
        layers: list[nn.Module] = []
        if expanded != channels:
            layers.append(_convolve(channels, expanded, 1, activation()))
        layers.append(_convolve(expanded, expanded, row.kernel, activation(), row.stride, groups=expanded))
        if row.squeezes:
            layers.append(SqueezeExcitation(expanded, _divisible(expanded // 4)))
        layers.append(_convolve(expanded, out, 1, None))
        self.block = nn.Sequential(*layers)
        self.has_shortcut = row.stride == 1 and channels == out

    def forward(self, inputs: Tensor) -> Tensor:
        """Return outputs of shape (N, out, height / stride, width / stride), rounded up."""
        outputs: Tensor = self.block(inputs)
        return outputs + inputs if self.has_shortcut else outputs


def _convolve(
    channels: int, out: int, kernel: int, activation: nn.Module | None, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    convolution = nn.Conv2d(channels, out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, _norm(out), *([activation] if activation else []))


def _divisible(channels: float) -> int:
    """Return the nearest multiple of `DIVISOR` that is at least nine tenths."""
    rounded = max(DIVISOR, int(channels + DIVISOR / 2) // DIVISOR * DIVISOR)
    return rounded + DIVISOR if rounded < 0.9 * channels else rounded


def mobilenet_v3_small(
    channels: int = 3, side: int = SIDE, width: float = 1.0, dropout: float = 0.0, classes: int = 1000
) -> Model:
    """Build the model; cuts are between blocks, named by the layers with weights below.

    Args:
        channels: Channels of the input, of shape (N, channels, height, width).
        side: Height and width of the declared example; others are accepted.
        width: Share of the channels of every layer.
        dropout: Dropout rate before the last layer in training; 0.2 in torchvision.
        classes: Outputs, of shape (N, classes).
    """
    if not width > 0 or side < 1:
        raise ValueError("width must be above zero, side at least 1")
    below = _divisible(FIRST * width)
    features: list[nn.Module] = [_convolve(channels, below, 3, nn.Hardswish(), 2)]
    for row in BOTTLENECKS:
        features.append(InvertedResidual(below, row, width=width))
        below = _divisible(row.out * width)
    last = EXPANSION * below
    features.append(_convolve(below, last, 1, nn.Hardswish()))
    hidden = _divisible(FEATURES * width)
    drop: nn.Module = DrawnDropout(dropout) if dropout else nn.Identity()
    classifier = nn.Sequential(nn.Linear(last, hidden), nn.Hardswish(), drop, nn.Linear(hidden, classes))
    parts = {
        "features": nn.Sequential(*features),
        "avgpool": nn.AdaptiveAvgPool2d(1),
        "flatten": nn.Flatten(),
        "classifier": classifier,
    }
    layers = kaiming(nn.Sequential(OrderedDict(parts)))
    return Model(layers, example=(channels, side, side), he_normal=True)
