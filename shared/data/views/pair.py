"""Seeded weak and strong views of a batch, of pictures or of other inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from shared.data.augment import PICTURES
from shared.data.sources.arrays import BRIGHTEST
from shared.data.views import pictures, windows
from shared.errors import ConfigError

Strength: TypeAlias = Literal["weak", "strong"]

_PICTURES: Mapping[Strength, Callable[..., Tensor]] = {"weak": pictures.weak, "strong": pictures.strong}
_OTHERS: Mapping[Strength, Callable[..., Tensor]] = {"weak": windows.weak, "strong": windows.strong}


def make_views(inputs: Tensor, strengths: tuple[Strength, ...], seed: int, *, mirrors: bool = True) -> list[Tensor]:
    """Make views of a batch in the order of `strengths`; deterministic in the seed.

    They are computed on the CPU and returned on the batch's device.

    Args:
        inputs: float32 of shape (B, ...); pictures, of four axes, must be in [0, 1].
        mirrors: False for pictures that mirroring would spoil.

    Raises:
        ConfigError: Pictures are not in [0, 1].
    """
    place, inputs, generator = inputs.device, inputs.cpu(), torch.Generator().manual_seed(seed)
    if inputs.ndim != PICTURES:
        return [_OTHERS[strength](inputs, generator).to(place) for strength in strengths]
    low, high = torch.aminmax(inputs)
    if low < 0 or high > 1:
        raise ConfigError(
            f"views are made of pictures in [0, 1], these are in [{low:g}, {high:g}]: take mean and std out of [data]"
        )
    pixels = (inputs * BRIGHTEST).round().to(torch.uint8)
    views = (_PICTURES[strength](pixels, generator, mirrors=mirrors) for strength in strengths)
    return [(view.to(torch.float32) / BRIGHTEST).to(place) for view in views]
