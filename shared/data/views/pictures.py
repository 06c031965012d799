"""Weak and strong augmentation of pictures: mirror and crop; plus RandAugment and cutout.

As in FixMatch, K. Sohn et al., 2020, https://arxiv.org/abs/2001.07685, and SemiSFL: crops move by an eighth of a
side, edges are reflected; RandAugment takes 2 of 14 operations at magnitude 10; cutout greys a square of half a side,
16 pixels of CIFAR's 32 (T. DeVries and G. W. Taylor, https://arxiv.org/abs/1708.04552). Bytes in, bytes out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shared.data.views.operations import OPERATIONS

MARGIN_SHARE, CUT_SHARE = 8, 2
"""Divisors of a side: the largest shift, and the size of a cutout."""
PICKED, MAGNITUDE, LARGEST = 2, 10, 30
GREY = 127


def weak(pictures: Tensor, generator: torch.Generator, *, mirrors: bool = True) -> Tensor:
    """Shift each picture by up to an eighth of its side, and mirror about half of them.

    Args:
        pictures: uint8 of shape (B, C, height, width).
        generator: Source of randomness; every picture consumes the same count of numbers.
        mirrors: False for pictures that mirroring would spoil, such as digits.
    """
    count, channels, height, width = pictures.shape
    shift = torch.rand(2, count, 1, generator=generator) * 2 - 1
    flips = (torch.rand(count, 1, generator=generator) < 1 / 2) & mirrors
    rows = _reflect(torch.arange(height) + (shift[0] * (height // MARGIN_SHARE)).round().long(), height)
    across = torch.where(flips, torch.arange(width - 1, -1, -1), torch.arange(width))
    columns = _reflect(across + (shift[1] * (width // MARGIN_SHARE)).round().long(), width)
    at = (rows[:, :, None] * width + columns[:, None, :]).flatten(1)
    shifted = pictures.flatten(2).gather(2, at[:, None].expand(-1, channels, -1))
    return shifted.view(pictures.shape)


def _reflect(places: Tensor, count: int) -> Tensor:
    """Mirror coordinates outside 0 .. `count` - 1 at the edges."""
    inner = places.abs()
    return torch.where(inner < count, inner, 2 * (count - 1) - inner)


def strong(pictures: Tensor, generator: torch.Generator, *, mirrors: bool = True) -> Tensor:
    """Return a weak view with two random operations applied to each picture, and a grey square.

    Args:
        pictures: uint8 of shape (B, C, height, width).
    """
    count = len(pictures)
    changed = weak(pictures, generator, mirrors=mirrors)
    for _ in range(PICKED):
        chosen = torch.randint(0, len(OPERATIONS), (count,), generator=generator)
        signs = torch.randint(0, 2, (count,), generator=generator) * 2 - 1
        changed = _operate(changed, chosen, signs * (MAGNITUDE / LARGEST))
    return cut_out(changed, torch.rand(2, count, generator=generator))


def _operate(pictures: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """Apply each picture's operation; pictures with the same operation are one batch."""
    after = pictures.clone()
    for number, operation in enumerate(OPERATIONS.values()):
        if len(index := (chosen == number).nonzero().flatten()):
            after[index] = operation(pictures[index], shares[index])
    return after


def cut_out(pictures: Tensor, centres: Tensor) -> Tensor:
    """Grey a square of half a side in each picture, cropped at the edges.

    Args:
        pictures: uint8 of shape (B, C, height, width).
        centres: Centre as a share of height and of width; of shape (2, B).
    """
    inside = []
    for side, centre in zip(pictures.shape[2:], centres, strict=True):
        half = side // CUT_SHARE // 2
        first = (centre * side).long()[:, None] - half
        places = torch.arange(side)
        inside.append((places >= first) & (places < first + 2 * half))
    square = inside[0][:, None, :, None] & inside[1][:, None, None, :]
    return torch.where(square, GREY, pictures)
