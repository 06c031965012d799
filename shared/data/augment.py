"""Random crop and mirror augmentation, applied to pictures whenever they are trained on.

The task's seed decides all changes, so a repeated task sees the same pictures.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

MARGIN = 4
"""Largest shift in pixels."""
PICTURES = 4
"""Axes of a batch of pictures."""

Augment = Callable[[Tensor, torch.Generator], Tensor]


def crop_flip(pictures: Tensor, generator: torch.Generator) -> Tensor:
    """Shift each picture by up to 4 pixels each way, padded with zeros, and mirror about half of them.

    Section 4.2 of He et al., Deep Residual Learning for Image Recognition, https://arxiv.org/abs/1512.03385, for CIFAR.

    Args:
        pictures: Of shape (B, channels, height, width).
        generator: Source of randomness; every picture consumes the same count of numbers.
    """
    count, channels, height, width = pictures.shape
    padded = functional.pad(pictures, (MARGIN,) * 4)
    row_shift, column_shift = torch.randint(0, 2 * MARGIN + 1, (2, count, 1), generator=generator)
    mirrored = torch.randint(0, 2, (count, 1), generator=generator) == 1
    rows = row_shift + torch.arange(height)
    columns = column_shift + torch.where(mirrored, torch.arange(width - 1, -1, -1), torch.arange(width))
    each, channel = torch.arange(count)[:, None, None, None], torch.arange(channels)[:, None, None]
    return padded[each, channel, rows[:, None, :, None], columns[:, None, None, :]]
