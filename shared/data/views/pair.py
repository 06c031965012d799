"""A weak and a strong view of a batch, by what its examples are; a function of a seed."""

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
    """Return views of a batch, in the order that they are asked for; the same seed gives the same ones.

    They are made on the CPU, and given back where the batch is.

    Args:
        inputs: float32 of shape (B, ...); pictures, of four axes, must be in [0, 1].
        strengths: What is asked for.
        seed: Of all that is drawn.
        mirrors: Whether pictures may be mirrored.

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
    whole = (inputs * BRIGHTEST).round().to(torch.uint8)
    views = (_PICTURES[strength](whole, generator, mirrors=mirrors) for strength in strengths)
    return [(view.to(torch.float32) / BRIGHTEST).to(place) for view in views]
