"""Check of a device's examples: counts, target quantiles, channel statistics, damaged files."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from shared.data.check_result import MAX_CHANNELS, MAX_DAMAGED, MAX_TARGETS, DataCheck
from shared.data.moments import find_mean_and_std, sum_moments
from shared.data.partition import take_share
from shared.data.sources import audio, folder
from shared.data.sources.arrays import Arrays, ReadPart, count_sides
from shared.data.sources.class_files import FileKind, Listing, list_files
from shared.data.sources.read import finish_part, read_part
from shared.data.spec import Data
from shared.data.summary import QUANTILES, find_warnings, most_values
from shared.errors import ConfigError

_FILES: Mapping[str, tuple[FileKind, Callable[..., object], Callable[..., ReadPart]]] = {
    "audio": (audio.SOUNDS, audio.check_file, audio.read_listing),
    "folder": (folder.PICTURES, folder.check_file, folder.read_listing),
}
"""Of sources with one example a file: kind of file, check of one, reader of several."""


def check_examples(spec: Data) -> DataCheck:
    """Read a device's examples, a bounded part of large ones, and summarise them; damaged files are left out.

    Raises:
        ConfigError: They cannot be trained on, for another reason than damaged files.
    """
    most, damaged = most_values(spec), list[str]()
    if spec.source in _FILES:
        kind, _, read = _FILES[spec.source]
        listing = list_files(spec, kind)
        damaged = _leave_out_damaged(listing, spec)
        part = finish_part(read(listing, spec, most), spec)
    else:
        part = read_part(spec, most)
    arrays, is_whole = part.arrays, len(part.arrays) == len(part.labels)
    if is_whole and spec.partition is not None:
        arrays = take_share(arrays, spec.partition)
    mean, std = find_mean_and_std([sum_moments(arrays.inputs)])
    held_out, training = count_sides(len(arrays), arrays.identities, spec)
    return DataCheck(
        examples=len(arrays) if is_whole else len(part.labels),
        is_whole=is_whole,
        shape=tuple(arrays.inputs.shape[1:]),
        mean=mean[:MAX_CHANNELS],
        std=std[:MAX_CHANNELS],
        classes=_count_classes(arrays, spec),
        quantiles=_find_quantiles(arrays, spec),
        training=training,
        held_out=held_out,
        damaged=tuple(damaged[:MAX_DAMAGED]),
        num_damaged=len(damaged),
        notes=(*part.notes, *find_warnings(spec, arrays.labels, arrays, is_whole=is_whole)),
    )


def _leave_out_damaged(listing: Listing, spec: Data) -> list[str]:
    """Remove damaged files from a listing; return a message about each.

    Raises:
        ConfigError: All files are damaged.
    """
    _, check_file, _ = _FILES[spec.source]
    messages, sound = list[str](), list[int]()
    for place, path in enumerate(listing.files):
        try:
            check_file(path, listing, spec)
            sound.append(place)
        except ConfigError as error:
            messages.append(str(error))
    if not sound:
        raise ConfigError(messages[0])
    listing.select(np.array(sound, dtype=np.int64))
    return messages


def _count_classes(arrays: Arrays, spec: Data) -> dict[str, int]:
    if not spec.is_labelled or spec.target_kind == "values":
        return {}
    names = spec.classes or arrays.classes
    numbers, counts = np.unique(arrays.labels, return_counts=True)
    return {
        names[number] if number < len(names) else str(number): count
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True)
    }


def _find_quantiles(arrays: Arrays, spec: Data) -> dict[str, tuple[float, ...]]:
    if not spec.is_labelled or spec.target_kind != "values":
        return {}
    columns = spec.target_columns or ()
    count = min(MAX_TARGETS, arrays.labels.shape[1])
    names = [_name_target(columns, number) for number in range(count)]
    return {name: tuple(np.quantile(arrays.labels[:, number], QUANTILES).tolist()) for number, name in enumerate(names)}


def _name_target(columns: tuple[str, ...], number: int) -> str:
    """Return the column of a target, with its place in the horizon after the first row."""
    if not columns:
        return str(number)
    row, column = divmod(number, len(columns))
    return columns[column] + (f" +{row + 1}" if row else "")
