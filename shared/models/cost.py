"""Network cost: parameters, FLOPs and traffic by legal cut and training step.

All of it follows from shapes; nothing is computed and no tensor takes memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.flop_counter import FlopCounterMode

from shared.errors import ConfigError
from shared.models import MODELS
from shared.models.adaptation import adapt
from shared.models.base import Model
from shared.models.build import build_blank, build_initial
from shared.models.misfit import describe_misfit
from shared.protocol.adaptation import NetworkAdaptation
from shared.protocol.messages import Spec
from shared.registry import FAULTS
from shared.tensors.tree import CPU

FLOAT_BYTES, LONG_BYTES = 4, 8
BYTE_CLASSES = 256
"""Number of classes whose labels fit into a byte."""
MAX_CACHED = 256
"""Maximum cached step counts."""
META = torch.device("meta")
MATRIX = 2
"""Minimum axes of a prunable weight: biases and normalisation parameters have one."""


@dataclass(frozen=True)
class Part:
    """Cost of some layers of a network.

    Attributes:
        prunable: Those in weights of convolutions and linear layers.
        forward_macs: Multiply-accumulate operations of a forward pass, for one example.
    """

    parameters: int
    prunable: int
    forward_macs: int


@dataclass(frozen=True)
class Cut:
    """Cost of one legal cut.

    Attributes:
        cut: As the model counts it.
        shape: Shape of one example's features, without the batch.
        features: Numbers in one example's features.
        below: Layers on the device; the server has the rest.
        features_bytes: Of one step: the features of a batch as float32, and its labels.
        gradient_bytes: Of one step: their gradient as float32, and the loss.
    """

    cut: int
    shape: tuple[int, ...]
    features: int
    below: Part
    features_bytes: int
    gradient_bytes: int


@dataclass(frozen=True)
class Table:
    """Cost of a network and of all its cuts.

    Attributes:
        batch_size: Examples in the batch of a step.
        cuts: In ascending order of the cut.
        uncut: Why the network has no cuts; empty if it is a chain of layers.
    """

    example: tuple[int, ...]
    batch_size: int
    whole: Part
    cuts: tuple[Cut, ...]
    uncut: str = ""


def cut_table(spec: Spec, example: tuple[int, ...] = (), batch_size: int = 64) -> Table:
    """Return the cost of a network and of each of its cuts.

    Args:
        example: Shape of one input, without the batch; empty for the model's declared one.
        batch_size: Examples in the batch of a step.

    Raises:
        ConfigError: The model or one of its options is unknown, or it does not accept such examples.
    """
    model = build_blank(spec)
    example = example or model.example
    if not example:
        raise ConfigError(f"model {spec.name!r} does not declare the shape of its examples; give their shape")
    try:
        return _describe_cuts(spec, model, torch.zeros((1, *example), device=META), batch_size)
    except ConfigError:
        if spec.name in MODELS:
            raise
    # a forward that reads numbers, or has constants, needs storage
    return _describe_cuts(spec, build_initial(spec, 0), torch.zeros((1, *example)), batch_size)


def _describe_cuts(spec: Spec, model: Model, example: Tensor, batch_size: int) -> Table:
    """Return the cost of a network and of its cuts for an example of shape (1, ...), on the network's device.

    Raises:
        ConfigError: It does not accept such examples, or not on this device.
    """
    layers, places, uncut = nn.Sequential(model.layers), dict[int, int](), ""
    try:
        layers, places = model.chain, dict(model.cut_places)
    except ConfigError as error:  # methods that train the whole network need no chain
        uncut = str(error)
    shapes, macs = _trace_shapes(layers, example)
    if not shapes[-1]:
        raise ConfigError(f"model {spec.name!r} does not return one tensor of shape (N, ...); correct its forward")
    classes, *places_of_labels = shapes[-1]  # of an image, a label for each pixel
    label_bytes = (1 if classes <= BYTE_CLASSES else LONG_BYTES) * math.prod(places_of_labels)
    cuts = []
    for cut, place in places.items():
        shape = shapes[place]
        features = math.prod(shape)
        size = FLOAT_BYTES * batch_size * features
        below = _part_cost(model.below(cut), macs[place])
        cuts.append(Cut(cut, shape, features, below, size + batch_size * label_bytes, size + FLOAT_BYTES))
    return Table(tuple(example.shape[1:]), batch_size, _part_cost(model.layers, macs[-1]), tuple(cuts), uncut)


def _trace_shapes(layers: nn.Sequential, example: Tensor) -> tuple[list[tuple[int, ...]], list[int]]:
    """Return shapes and cumulative multiplications before the first layer and after each, for an example (1, ...)."""
    outputs: object = example
    shapes, macs = [tuple(example.shape[1:])], [0]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        for layer in layers.eval():
            try:
                outputs = layer(outputs)
            except FAULTS as error:
                problem = describe_misfit(layers, partial(layers, example), error)
                raise ConfigError(
                    f"model: the network does not take examples of shape {shapes[0]} ({problem})"
                ) from error
            shapes.append(tuple(outputs.shape[1:]) if isinstance(outputs, Tensor) else ())
            macs.append(counter.get_total_flops() // 2)
    return shapes, macs


def _part_cost(layers: nn.Module, macs: int) -> Part:
    leaves = list(layers.parameters())
    return Part(
        parameters=sum(leaf.numel() for leaf in leaves),
        prunable=sum(leaf.numel() for leaf in leaves if leaf.ndim >= MATRIX),
        forward_macs=macs,
    )


def step_flops(
    spec: Spec,
    example: torch.Size,
    batch_size: int,
    *,
    trains: bool = True,
    below: int | None = None,
    adaptation: NetworkAdaptation | None = None,
) -> int:
    """Return the floating-point operations of one step: forward and, if it trains, backward of one batch.

    Counts matrix products and convolutions, a multiplication with its addition as 2; elementwise operations are
    ignored. Nothing is computed and no tensor takes memory. Frozen weights have no gradient, and the backward pass
    ends at the first layer that is trained.

    Args:
        example: Shape of one input, without the batch.
        trains: Whether there is a backward pass; an evaluation has none.
        below: Number of layers, from the first on; None for all.
        adaptation: Frozen leaves and adapters; None for a network that is trained in full.

    Raises:
        ConfigError: The model or one of its options is unknown, or it does not accept such inputs.
    """
    step = _Step(spec, tuple(example), batch_size, trains, below, adaptation)
    if spec.name not in MODELS:
        return _count_step(step)
    return _count_step_cached(msgspec.msgpack.encode(step), MODELS.get(spec.name))


def trained_share(spec: Spec, example: tuple[int, ...], adaptation: NetworkAdaptation | None) -> float:
    """Return the operations of a step with frozen leaves and adapters, as a share of a step that trains all.

    Args:
        example: Shape of one input, without the batch.

    Raises:
        ConfigError: As `step_flops`.
    """
    if not adaptation:
        return 1.0
    whole = step_flops(spec, torch.Size(example), 1)
    return step_flops(spec, torch.Size(example), 1, adaptation=adaptation) / whole if whole else 1.0


class _Step(msgspec.Struct, frozen=True):
    """Arguments of `step_flops`."""

    spec: Spec
    example: tuple[int, ...]
    batch_size: int
    trains: bool
    below: int | None
    adaptation: NetworkAdaptation | None


@lru_cache(maxsize=MAX_CACHED)
def _count_step_cached(packed: bytes, _builder: Callable[..., Model] | None) -> int:
    """Cache `_count_step` per process: a study repeats the same call in every cell."""
    return _count_step(msgspec.msgpack.decode(packed, type=_Step))


def _count_step(step: _Step) -> int:
    try:
        return _count_on(build_blank(step.spec), META, step)
    except ConfigError:
        if step.spec.name in MODELS:
            raise
    # a forward that reads numbers, or has constants, needs storage
    return _count_on(build_initial(step.spec, 0), CPU, step)


def _count_on(model: Model, device: torch.device, step: _Step) -> int:
    """Count the operations of one step.

    Raises:
        ConfigError: The network does not accept such inputs on this device.
    """
    model = adapt(model, step.adaptation) if step.adaptation else model
    network = (model.layers if step.below is None else model.chain[: step.below]).train()
    for layer in network.modules():
        if isinstance(layer, _BatchNorm):
            layer.eval()  # accepts a batch of one, with the same operations
    with torch.device(device):
        inputs = torch.zeros((step.batch_size, *step.example))
    counts = {torch.ops.aten.convolution_backward: _count_convolution_backward}
    with FlopCounterMode(display=False, custom_mapping=counts) as counter:
        try:
            outputs = network(inputs)
        except FAULTS as error:
            problem = describe_misfit(network, partial(network, inputs), error)
            raise ConfigError(
                f"model: the network does not take examples of shape {step.example} ({problem}); "
                "correct its options or code"
            ) from error
        if step.trains:
            outputs.sum().backward()
    return int(counter.get_total_flops())


def _count_convolution_backward(*arguments: Any, **_outputs: Any) -> int:
    """Return the operations of a convolution's backward; torch counts each weight's gradient once per group.

    Args:
        arguments: Shapes and options of `aten.convolution_backward`.
    """
    outputs, inputs, weight, *_ = arguments
    transposed, (needs_inputs, needs_weight, _) = arguments[7], arguments[10]
    places = (inputs if transposed else outputs)[2:]
    return int((needs_inputs + needs_weight) * 2 * outputs[0] * math.prod(places) * math.prod(weight))
