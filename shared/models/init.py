"""Initial parameters as a function of a seed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shared.messages import Spec
from shared.models import MODELS
from shared.models.base import Model
from shared.registry import build


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Make torch's global generator a function of `seed` inside the block, and as before after it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def initial(spec: Spec, seed: int) -> Model:
    """Build a model; the same seed gives the same parameters.

    Raises:
        ConfigError: The model or one of its options is unknown.
    """
    with seeded(seed):
        return build(MODELS, spec, "model")
