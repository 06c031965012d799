"""Build models by name: with initial weights, zeros, or no storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from shared.errors import ConfigError
from shared.models import MODELS
from shared.models.base import Model
from shared.models.initial_weights import fill
from shared.protocol.messages import Spec
from shared.registry import build
from shared.tensors.placement import generator_states, generators, set_generator_states

DRAW, TORCHS = "philox", ""
"""Generators of initial weights: `shared.models.initial_weights`; or torch's, as in older runs, whose records and tasks
name none."""

_DRAWS = frozenset(
    {nn.init.uniform_, nn.init.kaiming_uniform_, nn.init.kaiming_normal_, Tensor.uniform_, Tensor.normal_}
)

PARAMETERS = frozenset({torch.float32})
BUFFERS = frozenset({torch.float32, torch.int64, torch.int32})
"""Data types that every algorithm and codec can subtract and average."""

MOST_FAULTS = 4


@contextmanager
def seed_torch(seed: int) -> Iterator[None]:
    """Seed torch's global generators inside the block, and restore them after it.

    Covers the CPU and GPUs in use: `torch.manual_seed` would record a traceback for every other device type.
    """
    before = generator_states()
    for generator in generators():
        generator.manual_seed(seed)
    try:
        yield
    finally:
        set_generator_states(before)


def build_initial(spec: Spec, seed: int, draw: str = DRAW) -> Model:
    """Build a model with its initial weights, which depend on the seed alone, bit for bit on every machine.

    Except for a user's network (`module:function`): its builder draws from torch's seeded generator, whose bits may
    differ on another processor or in another version of torch.

    Args:
        draw: Generator of the weights: `DRAW`, or `TORCHS` for a run whose record names none.

    Raises:
        ConfigError: The model, one of its options or `draw` is unknown.
    """
    if draw not in {DRAW, TORCHS}:
        raise ConfigError(f"unknown generator of initial weights: {draw[:40]!r}; update this fieldfleet")
    if draw == TORCHS or spec.name not in MODELS:
        with seed_torch(seed):
            return _build(spec)
    with _SkipInitialisation():
        model = _build(spec)
    fill(model.layers, seed, he_normal=model.he_normal)
    return replace(model, draw=draw)


def build_zeroed(spec: Spec) -> Model:
    """Build a model with zeros, which are faster than draws, for weights that are loaded before use.

    A user's network is built as by `build_initial`.

    Raises:
        ConfigError: The model or one of its options is unknown.
    """
    if spec.name not in MODELS:
        return build_initial(spec, 0)
    with _SkipInitialisation():
        model = _build(spec)
    with torch.no_grad():
        for parameter in model.layers.parameters():
            parameter.zero_()
    return model


def build_blank(spec: Spec) -> Model:
    """Build a model without storage, only with shapes; parameters are passed to every call.

    Raises:
        ConfigError: The model or one of its options is unknown.
    """
    with torch.device("meta"), _SkipInitialisation():
        return _build(spec)


class _SkipInitialisation(TorchFunctionMode):
    """Suppress the random initialisation of torch's layers: weights stay uninitialised.

    Building on the device `meta` first would do the same, but torch imports a compiler for it, which takes two seconds.
    """

    def __torch_function__(
        self, func: Callable[..., Any], _types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return (args or tuple(kwargs.values()))[0] if func in _DRAWS else func(*args, **kwargs)


def _build(spec: Spec) -> Model:
    model = build(MODELS, spec, "model")
    if spec.name in MODELS:
        return replace(model, spec=spec)
    if not isinstance(model, Model) or not isinstance(model.layers, nn.Sequential):
        raise ConfigError(f"model {spec.name!r} returned a {type(model).__name__}, not a shared.models.base.Model")
    if faults := list(_faults(model.layers)):
        raise ConfigError(f"model {spec.name!r}: {'; '.join(faults[:MOST_FAULTS])}")
    return replace(model, spec=spec)


def _faults(layers: nn.Module) -> Iterator[str]:
    """Yield the parts of a user's network that cannot travel or be averaged, each with a remedy."""
    travelling, names = layers.state_dict().keys(), dict[int, str]()
    parameters = [(name, leaf, True) for name, leaf in layers.named_parameters(remove_duplicate=False)]
    buffers = [(name, leaf, False) for name, leaf in layers.named_buffers(remove_duplicate=False)]
    for name, leaf, is_parameter in (*parameters, *buffers):
        kind, dtype = "parameter" if is_parameter else "buffer", str(leaf.dtype).removeprefix("torch.")
        if is_lazy(leaf):
            yield f"{kind} {name} is of a lazy layer: name the layer's size, as nn.Linear(inputs, outputs) does"
        elif (other := names.setdefault(id(leaf), name)) != name:
            yield f"{kind} {name} is tied to {other}: give each its own, or call one module from a module that holds it"
        elif leaf.dtype not in (PARAMETERS if is_parameter else BUFFERS):
            remedy = "as float32: .float()" if is_parameter or leaf.is_floating_point() else "as int64: .long()"
            yield f"{kind} {name} is {dtype}: make it {remedy}"
        elif not is_parameter and name not in travelling:
            yield f"buffer {name} is not persistent: leave out persistent=False, or make it in forward"
