"""Parameters, FLOPs and traffic of a network, by legal cut and by training step.

All of it follows from shapes; nothing is computed and no tensor takes memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import msgspec
import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.flop_counter import FlopCounterMode

from shared.errors import ConfigError
from shared.models import MODELS
from shared.models.base import Model
from shared.models.build import blank
from shared.protocol.messages import Spec
from shared.registry import FAULTS, is_custom

FLOAT_BYTES, LONG_BYTES = 4, 8
BYTE_CLASSES = 256
"""So many classes have room in a byte."""
COUNTED = 256
"""Kinds of step whose operations are remembered."""
MATRIX = 2
"""Axes of the least weight that can be pruned: biases and what normalises have one."""


@dataclass(frozen=True)
class Part:
    """Some layers of a network.

    Attributes:
        parameters: How many numbers are learned.
        prunable: Those of them that are weights of convolutions and linear layers.
        forward_macs: Multiplications with an addition, forward, for one example.
    """

    parameters: int
    prunable: int
    forward_macs: int


@dataclass(frozen=True)
class Cut:
    """One legal cut.

    Attributes:
        cut: As the model counts it.
        shape: Of one example's features, without the batch.
        features: Numbers in them.
        below: What the device holds; the server has the rest.
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
    """A network with all its cuts.

    Attributes:
        example: Shape of one input.
        batch_size: Examples in the batch of a step.
        cuts: In ascending order.
    """

    example: tuple[int, ...]
    batch_size: int
    whole: Part
    cuts: tuple[Cut, ...]


def cut_table(spec: Spec, example: tuple[int, ...] = (), batch_size: int = 64) -> Table:
    """Return what each cut of a network means.

    Args:
        example: Shape of one input, without the batch; empty for the one that the model is made for.
        batch_size: Examples in the batch of a step.

    Raises:
        ConfigError: The model or one of its options is unknown, or it does not take such examples.
    """
    model = blank(spec)
    example = example or model.example
    if not example:
        raise ConfigError(f"model {spec.name!r} does not say what examples it is made for; give their shape")
    shapes, macs = _flow(model, example)
    if len(shapes[-1]) != 1:
        raise ConfigError(f"model {spec.name!r} gives an example an output of shape {shapes[-1]}, not one a class")
    label_bytes = 1 if shapes[-1][0] <= BYTE_CLASSES else LONG_BYTES
    cuts = []
    for cut, place in model.cuts.items():
        shape = shapes[place]
        features = math.prod(shape)
        moved = FLOAT_BYTES * batch_size * features
        below = _part(model.below(cut), macs[place])
        cuts.append(Cut(cut, shape, features, below, moved + batch_size * label_bytes, moved + FLOAT_BYTES))
    return Table(example, batch_size, _part(model.layers, macs[-1]), tuple(cuts))


def _flow(model: Model, example: tuple[int, ...]) -> tuple[list[tuple[int, ...]], list[int]]:
    """Return one example's shape, and the multiplications so far, in front of the first layer and behind each one."""
    flowing = torch.empty((1, *example), device="meta")
    shapes, macs = [tuple(flowing.shape[1:])], [0]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        for layer in model.layers.eval():
            try:
                flowing = layer(flowing)
            except FAULTS as error:
                problem = str(error).partition("\n")[0]
                raise ConfigError(f"model: it does not take examples of shape {example} ({problem})") from error
            shapes.append(tuple(flowing.shape[1:]))
            macs.append(counter.get_total_flops() // 2)
    return shapes, macs


def _part(layers: nn.Sequential, macs: int) -> Part:
    leaves = list(layers.parameters())
    return Part(
        parameters=sum(leaf.numel() for leaf in leaves),
        prunable=sum(leaf.numel() for leaf in leaves if leaf.ndim >= MATRIX),
        forward_macs=macs,
    )


def step_flops(
    spec: Spec, example: torch.Size, batch_size: int, *, trains: bool = True, below: int | None = None
) -> int:
    """Return the floating-point operations of one step: forward and, if it trains, backward of one batch.

    Products of matrices and convolutions count, a multiplication with its addition as 2; what works element by element
    does not. Nothing is computed and no tensor takes memory.

    Args:
        example: Shape of one input, without the batch.
        batch_size: Examples in a batch.
        trains: Whether there is a backward pass; an evaluation has none.
        below: Of how many layers from the first on; None for all of them.

    Raises:
        ConfigError: The model or one of its options is unknown, or it does not take such inputs.
    """
    if is_custom(spec.name):
        return _count_step(spec, example, batch_size, trains=trains, below=below)
    packed = msgspec.msgpack.encode(spec)
    return _counted_step(packed, MODELS.get(spec.name), tuple(example), batch_size, (trains, below))


@lru_cache(maxsize=COUNTED)
def _counted_step(
    packed: bytes,
    _builder: Callable[..., Model] | None,
    example: tuple[int, ...],
    batch_size: int,
    how: tuple[bool, int | None],
) -> int:
    """Return what `step_flops` does, counted once a process: a study asks the same in every cell."""
    spec = msgspec.msgpack.decode(packed, type=Spec)
    return _count_step(spec, torch.Size(example), batch_size, trains=how[0], below=how[1])


def _count_step(spec: Spec, example: torch.Size, batch_size: int, *, trains: bool, below: int | None) -> int:
    network = blank(spec).layers.train()[:below]
    for layer in network.modules():
        if isinstance(layer, _BatchNorm):
            layer.eval()  # which takes a batch of one too, and the same operations
    with torch.device("meta"):
        inputs = torch.empty((batch_size, *example))
        labels = torch.empty(batch_size, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        try:
            outputs = network(inputs)
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            problem = str(error).partition("\n")[0]
            raise ConfigError(
                f"model: it does not take examples of shape {tuple(example)} ({problem}); correct its options"
            ) from error
        loss = functional.cross_entropy(outputs, labels) if below is None else outputs.sum()
        if trains:
            loss.backward()
    return int(counter.get_total_flops())
