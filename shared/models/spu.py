"""FedSPU's three evaluation networks: 64,722, 134,902 and 26,285 parameters.

Z. Niu, H. Dong, A. K. Qin. FedSPU: Personalized Federated Learning for Resource-Constrained Devices with Stochastic
Parameter Update. AAAI 2025. https://arxiv.org/abs/2403.11464; BatchNorm is in the authors' code alone.
"""

from __future__ import annotations

from torch import nn

from shared.models.base import Model


def _block(channels: int, width: int, kernel: int, stride: int, padding: int) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(channels, width, kernel, stride, padding)
    # the same bits as ReLU before pooling, on a quarter of the numbers
    return convolution, nn.BatchNorm2d(width), nn.MaxPool2d(2), nn.ReLU()


# same bits as ReLU before pooling, on a quarter of the numbers


def _require_sizes(width: int, side: int, least: int) -> None:
    if width < 1 or side < least:
        raise ValueError(f"width must be at least 1, side at least {least}")


def spu_emnist(channels: int = 1, side: int = 28, width: int = 20, classes: int = 62) -> Model:
    """Build FedSPU's network for handwritten characters.

    Args:
        channels: Channels of the input, of shape (N, channels, side, side).
        side: Height and width of the input, at least 4.
        width: Channels of both convolutions.
        classes: Outputs, of shape (N, classes).
    """
    _require_sizes(width, side, 4)
    layers = nn.Sequential(
        *_block(channels, width, 3, 1, 1),
        *_block(width, width, 3, 1, 1),
        *(nn.Flatten(), nn.Linear(width * (side // 4) ** 2, classes)),
    )
    return Model(layers, {1: 4, 2: 8}, example=(channels, side, side))


def spu_cifar(channels: int = 3, side: int = 32, width: int = 6, classes: int = 10) -> Model:
    """Build FedSPU's network for colour images.

    Args:
        channels: Channels of the input, of shape (N, channels, side, side).
        side: Height and width of the input, at least 4.
        width: Channels of the first convolution, 6 in the paper; the other layers scale with it.
        classes: Outputs, of shape (N, classes).
    """
    _require_sizes(width, side, 4)
    second, third, fourth = (round(count * width / 6) for count in (16, 120, 84))
    layers = nn.Sequential(
        *_block(channels, width, 3, 1, 1),
        *_block(width, second, 3, 1, 1),
        *(nn.Flatten(), nn.Linear(second * (side // 4) ** 2, third, bias=False), nn.ReLU()),
        *(nn.Linear(third, fourth, bias=False), nn.ReLU()),
        nn.Linear(fourth, classes),
    )
    return Model(layers, {1: 4, 2: 8, 3: 11, 4: 13}, example=(channels, side, side))


def spu_speech(channels: int = 1, side: int = 32, width: int = 50, classes: int = 35) -> Model:
    """Build FedSPU's network for spectrograms of spoken words.

    Args:
        channels: Channels of the input, of shape (N, channels, side, side).
        side: Height and width of the input.
        width: Channels of both convolutions, with kernels of 2, stride 2 and padding 2.
        classes: Outputs, of shape (N, classes).
    """
    _require_sizes(width, side, 1)
    remaining_side = side
    for _ in range(2):
        remaining_side = ((remaining_side + 2) // 2 + 1) // 2
    layers = nn.Sequential(
        *_block(channels, width, 2, 2, 2),
        *_block(width, width, 2, 2, 2),
        *(nn.Flatten(), nn.Linear(width * remaining_side**2, classes)),
    )
    return Model(layers, {1: 4, 2: 8}, example=(channels, side, side))
