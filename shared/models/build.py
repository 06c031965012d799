"""From a model's name to the network: with parameters that are a function of a seed, or without storage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from shared import registry
from shared.errors import ConfigError
from shared.models import MODELS
from shared.models.base import Model
from shared.protocol.messages import Spec
from shared.registry import build


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Make torch's global generator a function of `seed` inside the block, and as before after it.

    That of the CPU, and no other: `torch.manual_seed` would write down a traceback for every kind of device besides.
    """
    generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)


def initial(spec: Spec, seed: int) -> Model:
    """Build a model; the same seed gives the same parameters.

    Raises:
        ConfigError: The model or one of its options is unknown.
    """
    with seeded(seed):
        return _built(spec)


def blank(spec: Spec) -> Model:
    """Build a model without storage, only its shapes; it is handed parameters at every call.

    Raises:
        ConfigError: The model or one of its options is unknown.
    """
    with torch.device("meta"):
        return _built(spec)


def _built(spec: Spec) -> Model:
    if not registry.is_own(spec.name):
        return replace(build(MODELS, spec, "model"), spec=spec)
    try:
        model = build({spec.name: registry.builder(spec.name)}, spec, "model")
    except registry.FAULTS as error:
        raise ConfigError(f"model {spec.name!r}: {type(error).__name__}: {error}; correct its builder") from error
    if not isinstance(model, Model) or not isinstance(model.layers, nn.Sequential):
        raise ConfigError(f"model {spec.name!r} returned a {type(model).__name__}, not a shared.models.base.Model")
    return replace(model, spec=spec)
