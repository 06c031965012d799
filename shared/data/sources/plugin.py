"""Examples from a user function: arrays, arrays by name, or (input, target) pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.data.sources.arrays import FLOAT_BYTES, Arrays, Labels, ReadPart, as_inputs
from shared.data.spec import Data
from shared.errors import ConfigError
from shared.registry import FAULTS
from shared.runtime.memory import require_room

PAIR = 2
CHECKED_EVERY = 256
"""Examples between two checks of the available memory."""
AXES = {"values": 2, "mask": 3}


def read_plugin(read: Callable[..., object], spec: Data) -> ReadPart:
    """Call `read(data, **options)`, which returns inputs and targets, `Arrays`, or a data set of such pairs.

    Inputs may be a dict of arrays, the inputs of a network by name: see `shared.models.named_inputs`.
    A data set has a length and numbered items, as PyTorch's do, or is iterable; one without a length is read up to
    `limit`.

    Raises:
        ConfigError: The function fails, or returns something else; the message names it.
    """
    try:
        result = read(spec, **(spec.options or {}))
        if isinstance(result, ReadPart):
            return result
        arrays = result if isinstance(result, Arrays) else _convert(result, spec)
    except FAULTS as error:
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(f"source {spec.source!r}: {problem}; correct its function, options or path") from error
    if len(arrays.inputs) != len(arrays.labels):
        counts = f"{len(arrays.inputs)} inputs and {len(arrays.labels)} targets"
        raise ConfigError(f"source {spec.source!r}: returned {counts}; return one target for each input")
    return ReadPart(arrays, arrays.labels)


def _convert(result: object, spec: Data) -> Arrays:
    """Convert what a function returned.

    Raises:
        ConfigError: It is neither arrays nor a data set.
    """
    if not spec.is_labelled and (hasattr(result, "dtype") or isinstance(result, Mapping)):
        return Arrays.from_inputs(_pack(result, spec))
    if isinstance(result, tuple) and len(result) == PAIR and all(hasattr(part, "__len__") for part in result):
        inputs, targets = _pack(result[0], spec), np.asarray(result[1])
    elif isinstance(result, Iterable) or hasattr(result, "__getitem__"):
        inputs, targets = _collect(result, spec)
    else:
        kind = type(result).__name__
        raise ConfigError(
            f"source {spec.source!r} returned a {kind}; return inputs and targets, or a data set of such pairs"
        )
    return Arrays(inputs, _as_labels(targets, spec)) if spec.is_labelled else Arrays.from_inputs(inputs)


def _pack(inputs: object, spec: Data) -> NDArray[np.float32]:
    """Return inputs of shape (N, ...); those of a dict flattened, one after the other in the order of their names."""
    if not isinstance(inputs, Mapping):
        return as_inputs(np.asarray(inputs))
    arrays = {str(name): as_inputs(np.asarray(array)) for name, array in inputs.items()}
    lengths = {name: len(array) for name, array in sorted(arrays.items())}
    if len(set(lengths.values())) != 1:
        counts = ", ".join(f"{name} {length}" for name, length in lengths.items()) or "none"
        raise ConfigError(f"source {spec.source!r}: examples of its inputs: {counts}; return as many of each")
    return np.concatenate([arrays[name].reshape(len(arrays[name]), -1) for name in lengths], axis=1)


def _collect(examples: Any, spec: Data) -> tuple[NDArray[np.float32], NDArray[Any]]:
    """Stack the pairs of a data set."""
    inputs, targets = list[NDArray[Any]](), list[NDArray[Any]]()
    for pair in _iterate(examples, spec):
        if not isinstance(pair, tuple | list) or len(pair) != PAIR:
            raise ConfigError(f"source {spec.source!r}: an item is a {type(pair).__name__}; make it (input, target)")
        inputs.append(np.asarray(pair[0]))
        targets.append(np.asarray(pair[1]))
        if inputs[-1].shape != inputs[0].shape:
            shapes = f"{inputs[-1].shape}, not {inputs[0].shape} as that of the first"
            raise ConfigError(f"source {spec.source!r}: input {len(inputs) - 1} (from 0) has the shape {shapes}")
        if len(inputs) % CHECKED_EVERY == 0:
            require_room(2 * len(inputs) * inputs[0].size * FLOAT_BYTES, Path(spec.path or spec.source))
    if not inputs:
        raise ConfigError(f"source {spec.source!r}: returned no example; correct its function or path")
    return as_inputs(np.stack(inputs)), np.stack(targets)


def _iterate(examples: Any, spec: Data) -> Iterator[Any]:
    if hasattr(examples, "__len__") and hasattr(examples, "__getitem__"):
        return (examples[number] for number in range(len(examples)))
    return islice(iter(examples), spec.limit)


def _as_labels(targets: NDArray[Any], spec: Data) -> Labels:
    """Convert targets to the dtype and shape of their kind.

    Raises:
        ConfigError: They are of another kind.
    """
    kind = spec.target_kind
    if kind == "values" and targets.dtype.kind in "biuf" and targets.ndim in (1, AXES[kind]):
        return targets.reshape(len(targets), -1).astype(np.float32)
    axes = AXES.get(kind, 1)
    if kind != "values" and targets.dtype.kind in "biu" and targets.ndim == axes:
        return targets.astype(np.int64)
    expected = {"class": "integers of shape (N,)", "values": "numbers of shape (N, outputs)"}
    raise ConfigError(
        f"source {spec.source!r}: targets are {targets.dtype} of shape {targets.shape}; return "
        f'{expected.get(kind, "integers of shape (N, height, width)")}, or set data.targets to "values" or "mask"'
    )
