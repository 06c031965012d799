"""Weak and strong augmentation of sensor windows and feature rows.

T. T. Um et al., Data Augmentation of Wearable Sensor Data, 2017, https://arxiv.org/abs/1706.00527: noise, scaling,
segments in another order; and a masked stretch of time, as D. S. Park et al., SpecAugment, 2019,
https://arxiv.org/abs/1904.08779. Noise is a share of each channel's own deviation, whatever its unit.
"""

from __future__ import annotations

import torch
from torch import Tensor

NOISE, SCALE = 0.05, 0.1
SEGMENTS, MASK_SHARE = 4, 8
"""Segments that are permuted; the masked share of the time is 1 / MASK_SHARE."""


def weak(windows: Tensor, generator: torch.Generator) -> Tensor:
    """Add noise to windows, and scale each channel by about one.

    Args:
        windows: Of shape (B, channels, time), or (B, features): then each feature is a channel, and is not scaled.
        generator: Source of randomness; every window consumes the same count of numbers.
    """
    noise = torch.randn(windows.shape, generator=generator)
    if windows.ndim == 2:  # noqa: PLR2004 - rows of features
        return windows + NOISE * windows.std(0, correction=0) * noise
    scale = 1 + SCALE * torch.randn(*windows.shape[:2], 1, generator=generator)
    return (windows + NOISE * windows.std(2, correction=0, keepdim=True) * noise) * scale


def strong(windows: Tensor, generator: torch.Generator) -> Tensor:
    """Return a weak view with a masked part; of windows, with permuted time segments too.

    Args:
        windows: Of a shape that `weak` accepts.
    """
    changed, length = weak(windows, generator), windows.shape[-1]
    begins = (torch.rand(len(windows), 1, generator=generator) * length).long()
    beyond = (torch.arange(length) - begins) % length
    if windows.ndim > 2:  # noqa: PLR2004
        order = torch.rand(len(windows), SEGMENTS, generator=generator).argsort(1)
        segment = torch.arange(length) * SEGMENTS // max(1, length)
        rank = order.argsort(1)[:, segment]  # where each moment's segment goes
        at = (rank * length + torch.arange(length)).argsort(1)
        changed = changed.gather(2, at[:, None].expand(-1, windows.shape[1], -1))
        beyond = beyond[:, None]
    return torch.where(beyond < length // MASK_SHARE, 0.0, changed)
