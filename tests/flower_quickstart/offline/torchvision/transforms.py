"""Transforms of pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

Transform = Callable[[Any], Any]


def ToTensor() -> Transform:  # noqa: N802 - torchvision's name
    """Return a function from H x W x C bytes to C x H x W numbers from 0 to 1."""
    return lambda picture: torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255


def Normalize(mean: Sequence[float], std: Sequence[float]) -> Transform:  # noqa: N802 - as above
    """Return a function that normalises each channel."""

    def normalise(picture: Tensor) -> Tensor:
        return (picture - torch.tensor(mean).reshape(-1, 1, 1)) / torch.tensor(std).reshape(-1, 1, 1)

    return normalise


def Compose(transforms: Sequence[Transform]) -> Transform:  # noqa: N802 - as above
    """Return a function that applies some others in order."""
    return lambda picture: reduce(lambda value, transform: transform(value), transforms, picture)
