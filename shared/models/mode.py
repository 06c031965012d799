"""Whether layers train or evaluate: what BatchNorm and dropout go by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_mode(layers: nn.Module, *, train: bool) -> Iterator[None]:
    """Have layers train or evaluate inside the block, and as before after it."""
    if layers.training == train:
        yield
        return
    layers.train(train)
    try:
        yield
    finally:
        layers.train(not train)
