"""Build a network by its name: with first weights that are a function of a seed, with zeros, or without storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from shared import registry
from shared.errors import ConfigError
from shared.models import MODELS
from shared.models.base import Model
from shared.models.initial_weights import fill
from shared.protocol.messages import Spec
from shared.registry import build
from shared.tensors.placement import generator_states, generators, set_generator_states

DRAW, TORCHS = "philox", ""
"""Who draws first weights: `shared.models.initial_weights`; or torch's generator, as in all runs begun before, whose
records and tasks name none."""

_DRAWS = frozenset(
    {nn.init.uniform_, nn.init.kaiming_uniform_, nn.init.kaiming_normal_, Tensor.uniform_, Tensor.normal_}
)

PARAMETERS = frozenset({torch.float32})
BUFFERS = frozenset({torch.float32, torch.int64, torch.int32})
"""Types that every method and codec can subtract and average."""

MOST_FAULTS = 4


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Make torch's global generators a function of `seed` inside the block, and as before after it.

    That of the CPU, and of GPUs in use: `torch.manual_seed` would write down a traceback for every other kind besides.
    """
    before = generator_states()
    for generator in generators():
        generator.manual_seed(seed)
    try:
        yield
    finally:
        set_generator_states(before)


def initial(spec: Spec, seed: int, draw: str = DRAW) -> Model:
    """Build a model with its first weights; the same seed gives the same ones, bit for bit on every machine.

    But for a network of the user's own (`module:function`): it draws as it likes while it is built, from torch's seeded
    generator, which may give other bits on another processor or in another version of torch.

    Args:
        seed: Other seeds give other weights.
        draw: Who draws them: `DRAW`, or `TORCHS` for what a run began with whose record names nobody.

    Raises:
        ConfigError: The model or one of its options is unknown, or so is `draw`.
    """
    if draw not in {DRAW, TORCHS}:
        raise ConfigError(
            f"first weights are to be drawn by {draw[:40]!r}, which is unknown here; update this fieldfleet"
        )
    if draw == TORCHS or registry.is_custom(spec.name):
        with seeded(seed):
            return _built(spec)
    with _Undrawn():
        model = _built(spec)
    fill(model.layers, seed, he_normal=model.he_normal)
    return replace(model, draw=draw)


def zeroed(spec: Spec) -> Model:
    """Build a model that is given its weights before it is used: they are zeros, which are sooner there than draws.

    A network of the user's own is as `initial` builds it.

    Raises:
        ConfigError: The model or one of its options is unknown.
    """
    if registry.is_custom(spec.name):
        return initial(spec, 0)
    with _Undrawn():
        model = _built(spec)
    with torch.no_grad():
        for parameter in model.layers.parameters():
            parameter.zero_()
    return model


def blank(spec: Spec) -> Model:
    """Build a model without storage, only its shapes; it is handed parameters at every call.

    Raises:
        ConfigError: The model or one of its options is unknown.
    """
    with torch.device("meta"), _Undrawn():
        return _built(spec)


class _Undrawn(TorchFunctionMode):
    """Have torch's layers leave weights as they lie in memory, where they would draw them.

    Building on the device `meta` first would do as well, but for two seconds in which torch imports a compiler.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        _types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        return (args or tuple(kwargs.values()))[0] if func in _DRAWS else func(*args, **kwargs)


def _built(spec: Spec) -> Model:
    if not registry.is_custom(spec.name):
        return replace(build(MODELS, spec, "model"), spec=spec)
    try:
        model = build({spec.name: registry.import_builder(spec.name)}, spec, "model")
    except registry.FAULTS as error:
        raise ConfigError(f"model {spec.name!r}: {type(error).__name__}: {error}; correct its builder") from error
    if not isinstance(model, Model) or not isinstance(model.layers, nn.Sequential):
        raise ConfigError(f"model {spec.name!r} returned a {type(model).__name__}, not a shared.models.base.Model")
    if faults := list(_faults(model.layers)):
        raise ConfigError(f"model {spec.name!r}: {'; '.join(faults[:MOST_FAULTS])}")
    return replace(model, spec=spec)


def _faults(layers: nn.Module) -> Iterator[str]:
    """Yield what of a user's network cannot travel or be averaged, each with what to write in its place."""
    travelling, seen = layers.state_dict().keys(), dict[int, str]()
    parameters = [(name, leaf, True) for name, leaf in layers.named_parameters(remove_duplicate=False)]
    buffers = [(name, leaf, False) for name, leaf in layers.named_buffers(remove_duplicate=False)]
    for name, leaf, is_parameter in (*parameters, *buffers):
        kind, dtype = "parameter" if is_parameter else "buffer", str(leaf.dtype).removeprefix("torch.")
        if is_lazy(leaf):
            yield f"{kind} {name} is of a lazy layer: name the layer's size, as nn.Linear(inputs, outputs) does"
        elif (other := seen.setdefault(id(leaf), name)) != name:
            yield f"{kind} {name} is tied to {other}: give each its own, or call one module from a module that holds it"
        elif leaf.dtype not in (PARAMETERS if is_parameter else BUFFERS):
            remedy = "as float32: .float()" if is_parameter or leaf.is_floating_point() else "as int64: .long()"
            yield f"{kind} {name} is {dtype}: make it {remedy}"
        elif not is_parameter and name not in travelling:
            yield f"buffer {name} is not persistent: leave out persistent=False, or make it in forward"
