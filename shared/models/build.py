"""Build models by name: with initial weights, zeros, or no storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from shared.errors import ConfigError
from shared.models import MODELS
from shared.models.base import Model
from shared.models.initial_weights import fill
from shared.models.misfit import dtype_name
from shared.protocol.messages import Spec
from shared.registry import build
from shared.tensors.generators import seed_torch

DRAW, TORCHS = "philox", ""
"""Generators of initial weights: `shared.models.initial_weights`; or torch's, as in older runs, whose records and tasks
name none."""

_DRAWS = frozenset(
    {nn.init.uniform_, nn.init.kaiming_uniform_, nn.init.kaiming_normal_, Tensor.uniform_, Tensor.normal_}
)

PARAMETERS = frozenset({torch.float32})
BUFFERS = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
)
"""Data types that every algorithm and codec can subtract and average."""

MOST_FAULTS = 4


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
    if spec.name not in MODELS:
        return _build_outline(spec)
    with torch.device("meta"), _SkipInitialisation():
        return _build(spec)


def _build_outline(spec: Spec) -> Model:
    """Build a user's network without storage for its parameters and persistent buffers.

    Constants, which are not in the state dict, keep their values. A network with constants, or one whose builder reads
    numbers, is built with storage first.
    """
    try:
        with torch.device("meta"), _SkipInitialisation():
            model = _build(spec)
        if not _constants(model.layers):
            return model
    except ConfigError:  # from code that reads a number of a tensor; other faults are raised again
        pass
    model = build_initial(spec, 0)
    travelling, outlines = model.layers.state_dict(keep_vars=True).values(), dict[int, Tensor]()
    for leaf in travelling:  # one outline for all names of a tied leaf
        outline = torch.empty_like(leaf, device="meta", requires_grad=leaf.requires_grad)
        outlines[id(leaf)] = nn.Parameter(outline, leaf.requires_grad) if isinstance(leaf, nn.Parameter) else outline
    for module in model.layers.modules():
        for leaves in (module._parameters, module._buffers):  # noqa: SLF001 - as `Module._apply` does
            leaves.update({name: outlines.get(id(leaf), leaf) for name, leaf in leaves.items()})  # type: ignore[misc]
    return model


def require_fixed_constants(spec: Spec) -> None:
    """Reject a user's network with random tensors outside its state dict, which would differ between devices.

    Raises:
        ConfigError: They depend on the random generator; or as `build_initial`.
    """
    if spec.name in MODELS or not _constants(build_blank(spec).layers):
        return
    first, second = (_constants(build_initial(spec, seed).layers) for seed in (0, 1))
    if random := [name for name, leaf in first.items() if name not in second or not torch.equal(leaf, second[name])]:
        raise ConfigError(
            f"model {spec.name!r}: {random[0]} is drawn at random and is not in the state dict, so that every device "
            "would have another: use register_buffer without persistent=False"
        )


def _constants(layers: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a network holds outside its state dict, by name."""
    travelling = {id(leaf) for leaf in layers.state_dict(keep_vars=True).values()}
    tensors = dict(layers.named_buffers())
    for prefix, module in layers.named_modules():
        for name, value in vars(module).items():
            values = value if isinstance(value, list | tuple) else [value]
            tensors |= {f"{prefix}.{name}[{at}]": leaf for at, leaf in enumerate(values) if isinstance(leaf, Tensor)}
    return {name: leaf for name, leaf in tensors.items() if id(leaf) not in travelling}


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
    built: object = build(MODELS, spec, "model")
    if isinstance(built, list | tuple) and built and all(isinstance(leaf, Tensor | np.ndarray) for leaf in built):
        built = nn.ParameterList(torch.as_tensor(leaf, dtype=torch.float32) for leaf in built)  # of a Flower app
    model = Model(built) if isinstance(built, nn.Module) else built
    if not isinstance(model, Model) or not isinstance(model.layers, nn.Module):
        kind = f"the class {built.__name__}" if isinstance(built, type) else f"a {type(built).__name__}"
        raise ConfigError(
            f"model {spec.name!r} returned {kind}; return a torch.nn.Module, or a shared.models.base.Model that names "
            "the module's cuts"
        )
    if spec.name in MODELS:
        return replace(model, spec=spec)
    if faults := list(_faults(model.layers)):
        raise ConfigError(f"model {spec.name!r}: {'; '.join(faults[:MOST_FAULTS])}")
    return replace(model, spec=spec)


def _faults(layers: nn.Module) -> Iterator[str]:
    """Yield the parts of a user's network that cannot travel or be averaged, each with a remedy."""
    parameters = [(name, leaf, True) for name, leaf in layers.named_parameters()]
    for name, leaf, is_parameter in (*parameters, *((name, leaf, False) for name, leaf in layers.named_buffers())):
        kind, dtype = "parameter" if is_parameter else "buffer", dtype_name(leaf.dtype)
        if is_lazy(leaf):
            yield f"{kind} {name} is of a lazy layer: name the layer's size, as nn.Linear(inputs, outputs) does"
        elif leaf.dtype not in (PARAMETERS if is_parameter else BUFFERS):
            remedy = "it float32: .float()" if is_parameter else f"it one of {', '.join(map(dtype_name, BUFFERS))}"
            yield f"{kind} {name} is {dtype}: make {remedy}"
    values: Mapping[str, object] = layers.state_dict()
    for name, value in values.items():
        if not isinstance(value, Tensor):
            yield f"{name} in the state dict is a {type(value).__name__}: store it in a buffer"
        elif "/" in name or " " in name:
            yield f"{name!r} in the state dict has a slash or a space: give it another name"
