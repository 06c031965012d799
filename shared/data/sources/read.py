"""Read a `Data` spec's examples: source, limit, partition, standardisation; with numpy, without torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shared.data.classes import require_number
from shared.data.identity import hash_contents
from shared.data.partition import draw_balanced, exclude_indices, take_share
from shared.data.sources import audio, csv, digits, folder, idx, none, npz, parquet, sqlite
from shared.data.sources.arrays import Arrays, ReadPart, is_finite, select_held_out, shuffled_order
from shared.data.sources.plugin import read_plugin
from shared.data.spec import Data
from shared.errors import ConfigError
from shared.protocol.messages import MAX_CLASSES
from shared.registry import Registry, find
from shared.runtime.memory import require_room

SOURCES: Registry[Callable[..., ReadPart]] = Registry(
    "source",
    "sources",
    {
        "audio": audio.read_part,
        "csv": csv.read_part,
        "digits": digits.read_part,
        "folder": folder.read_part,
        "idx": idx.read_part,
        "none": none.read_part,
        "npz": npz.read_part,
        "parquet": parquet.read_part,
        "sqlite": sqlite.read_part,
    },
)
"""Reader of each `Data.source`; the second argument limits the number of values, None for all examples."""

PICTURE_DIMENSIONS = 4
LIMIT_SEED = 0
"""Seed of the examples within `limit`, fixed so that devices agree on them."""


def read_share(spec: Data) -> Arrays:
    """Read the source, reduce it to `limit` examples, then to this device's share; held-out examples are included.

    The whole split is in memory as float32 until the share is taken: 190 MB for MNIST.

    Raises:
        ConfigError: A file is missing, damaged or not as expected, or the partition does not fit it.
    """
    examples = read_whole(spec)
    share = examples if spec.partition is None else take_share(examples, spec.partition)
    return share if spec.is_labelled else share.without_labels()


def read_held_out(spec: Data) -> Arrays:
    """Read the examples that a device holds out for evaluation; raise as `read_share`."""
    return select_held_out(read_share(spec), spec.holdout)


def read_whole(spec: Data) -> Arrays:
    """Read the examples that the devices share: `limit` of the source, then `drawn` and `without`.

    Labels needed by the partition are included, even where training uses none.

    Raises:
        ConfigError: A file is missing, damaged or not as expected.
    """
    return select_examples(read_part(spec).arrays, spec)


def select_examples(examples: Arrays, spec: Data) -> Arrays:
    """Return `limit` of a whole split's examples, then `drawn` of them and not those of `without`."""
    if spec.limit is not None and spec.limit < len(examples):
        examples = examples.subset(np.sort(shuffled_order(len(examples), LIMIT_SEED)[: spec.limit]))
    if spec.drawn:
        examples = examples.subset(draw_balanced(examples.labels, spec.drawn))
    if spec.without:
        examples = examples.subset(exclude_indices(len(examples), draw_balanced(examples.labels, spec.without)))
    return examples


def read_part(spec: Data, most: int | None = None) -> ReadPart:
    """Read the source, or a part of it with at most `most` values, and standardise it.

    Raises:
        ConfigError: A file is missing, damaged or not as expected.
    """
    place = spec.path or spec.source
    try:
        part = _read_source(spec, most)
    except MemoryError as error:
        raise ConfigError(f"{place}: out of memory ({error}); give this device fewer or smaller examples") from error
    return finish_part(part, spec)


def finish_part(part: ReadPart, spec: Data) -> ReadPart:
    """Set channels, check values, identify and select the newest examples, and standardise what a source read.

    Raises:
        ConfigError: The examples are not as expected.
    """
    place = spec.path or spec.source
    examples = _set_channels(part.arrays, spec, place)
    _require_sound(examples, spec, place)
    if spec.is_held_out_by_hash and examples.identities is None:
        examples = replace(examples, identities=hash_contents(examples.inputs))
    if spec.recent and len(examples) > spec.recent:
        examples = examples.subset(np.arange(len(examples) - spec.recent, len(examples)))
    if spec.augment != "none" and examples.inputs.ndim != PICTURE_DIMENSIONS:
        shape = "x".join(map(str, examples.inputs.shape[1:]))
        raise ConfigError(f"{place}: augment {spec.augment!r} needs pictures, but inputs have shape {shape}; remove it")
    _standardise(examples, spec, place)
    return replace(part, arrays=examples)


def _read_source(spec: Data, most: int | None) -> ReadPart:
    """Read a built-in source, or call a plugin."""
    read = find(SOURCES, spec.source, "source")
    return read(spec, most) if spec.source in SOURCES else read_plugin(read, spec)


def _set_channels(examples: Arrays, spec: Data, place: str) -> Arrays:
    """Convert pictures to the configured number of channels: grey ones get three equal channels."""
    inputs = examples.inputs
    if not spec.channels or not inputs.size or inputs.shape[1] == spec.channels:
        return examples
    if inputs.ndim != PICTURE_DIMENSIONS or inputs.shape[1] != 1:
        shape = "x".join(map(str, inputs.shape[1:]))
        raise ConfigError(
            f"{place}: an example has the shape {shape}, which channels = {spec.channels} does not fit; remove it"
        )
    require_room(inputs.nbytes * spec.channels, Path(place))
    return replace(examples, inputs=np.repeat(inputs, spec.channels, axis=1))


def _standardise(examples: Arrays, spec: Data, place: str) -> None:
    """Subtract the mean and divide by the deviation, in place: there is memory for one copy of a data set."""
    channels = examples.inputs.shape[1]
    for name, values in (("mean", spec.mean), ("std", spec.std)):
        if len(values) not in (0, 1, channels):
            raise ConfigError(
                f"{place}: {name} has {len(values)} numbers, the inputs {channels} channels; correct {name}"
            )
    standardise(examples.inputs, spec.mean, spec.std)


def standardise(inputs: NDArray[np.float32], mean: Sequence[float], std: Sequence[float]) -> NDArray[np.float32]:
    """Subtract the mean of each channel and divide by its deviation, in place.

    Args:
        inputs: Of shape (N, channels, ...).
        mean: One number for all channels or one per channel; empty for nothing.
        std: One number for all channels or one per channel, above zero; empty for nothing.
    """
    beside = (-1, *(1,) * (inputs.ndim - 2))
    if mean:
        inputs -= np.array(mean, dtype=np.float32).reshape(beside)
    if std:
        inputs /= np.array(std, dtype=np.float32).reshape(beside)
    return inputs


def _require_sound(examples: Arrays, spec: Data, place: str) -> None:
    if not len(examples) or not examples.inputs.size:
        raise ConfigError(f"{place}: holds no examples; correct path")
    labels = examples.labels
    if spec.reads_labels and labels.dtype == np.float32:
        _require_finite(labels, "among its targets", place)
    elif spec.reads_labels:
        if (lowest := int(labels.min())) < 0:
            raise ConfigError(f"{place}: holds the label {lowest}; number the classes from 0")
        if (highest := int(labels.max())) >= MAX_CLASSES:
            raise ConfigError(
                f"{place}: holds a label above {MAX_CLASSES - 1}, the highest class; number the classes from 0"
            )
        if spec.classes:
            require_number(highest, spec.classes, Path(place))
    _require_finite(examples.inputs, "", place)


def _require_finite(values: NDArray[np.float32], where: str, place: str) -> None:
    if not is_finite(values):
        row = next(row for row, numbers in enumerate(values) if not np.isfinite(numbers).all())
        what = f"NaN or infinity {where}".strip()
        raise ConfigError(f"{place}: example {row} (from 0) holds {what}; remove or replace such values")
