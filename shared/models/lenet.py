"""LeNet-5 with ReLUs and max pooling, with 61,706 parameters by default.

Y. LeCun, L. Bottou, Y. Bengio, P. Haffner. Gradient-Based Learning Applied to Document Recognition. Proceedings of the
IEEE 86(11), 1998. https://doi.org/10.1109/5.726791
"""

from __future__ import annotations

from torch import nn

from shared.models.base import Model

KERNEL = 5
FULL_SIDE, LEAST_SIDE = 32, 12


def lenet(channels: int = 1, side: int = 28, width: int = 6, classes: int = 10) -> Model:
    """Build the model.

    Args:
        channels: Channels of the input, of shape (N, channels, side, side).
        side: Height and width of the input, at least 12; images smaller than 32 x 32 get a padding of 2.
        width: Channels of the first convolution, 6 in the paper; the other layers scale with it.
        classes: Outputs, of shape (N, classes).
    """
    if side < LEAST_SIDE or width < 1:
        raise ValueError(f"side must be at least {LEAST_SIDE}, width at least 1")
    second, third, fourth = (round(count * width / 6) for count in (16, 120, 84))
    margin = 0 if side >= FULL_SIDE else 2
    remaining_side = ((side + 2 * margin - KERNEL + 1) // 2 - KERNEL + 1) // 2
    layers = nn.Sequential(
        *(nn.Conv2d(channels, width, KERNEL, padding=margin), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(width, second, KERNEL), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(second * remaining_side**2, third), nn.ReLU()),
        *(nn.Linear(third, fourth), nn.ReLU()),
        nn.Linear(fourth, classes),
    )
    return Model(layers, {1: 3, 2: 6, 3: 9, 4: 11}, example=(channels, side, side))
