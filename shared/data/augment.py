"""Augment pictures by random crops and mirrors every time they are trained on.

The device draws the changes from its task's seed: the same wherever the task is done, and whoever repeats it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

MARGIN = 4
"""Pixels by which a picture moves at most."""
PICTURES = 4
"""Axes of a batch of pictures."""

Augment = Callable[[Tensor, torch.Generator], Tensor]


def crop_flip(pictures: Tensor, generator: torch.Generator) -> Tensor:
    """Move each picture by up to 4 pixels each way, zeros coming in, and mirror every second one or so.

    Section 4.2 of He et al., Deep Residual Learning for Image Recognition, https://arxiv.org/abs/1512.03385, for CIFAR.

    Args:
        pictures: Of shape (B, channels, height, width).
        generator: Draws; as many numbers for each picture, whatever they are.
    """
    count, channels, height, width = pictures.shape
    padded = functional.pad(pictures, (MARGIN,) * 4)
    top, left = torch.randint(0, 2 * MARGIN + 1, (2, count, 1), generator=generator)
    mirrored = torch.randint(0, 2, (count, 1), generator=generator) == 1
    rows = top + torch.arange(height)
    columns = left + torch.where(mirrored, torch.arange(width - 1, -1, -1), torch.arange(width))
    each, channel = torch.arange(count)[:, None, None, None], torch.arange(channels)[:, None, None]
    return padded[each, channel, rows[:, None, :, None], columns[:, None, None, :]]


AUGMENTS: Mapping[str, Augment] = {"crop-flip": crop_flip}
"""By their name in `Data.augment`."""
