"""Data set summary for users: class counts, shape, value range, skipped files."""

from __future__ import annotations

import msgspec
import numpy as np

from shared.data.classes import format_class_names
from shared.data.name_text import show_name
from shared.data.partition import take_share
from shared.data.sources.arrays import Arrays, ReadPart, count_held_out, count_training
from shared.data.sources.read import read_part
from shared.data.spec import Data
from shared.runtime.memory import MIB, available_bytes

MOST_VALUES, MOST_CELLS = 1 << 26, 1 << 22
"""Limit of input values to read; lower for CSV files, whose cells take longer."""
SHARE_OF_MEMORY = 16
MOST_CLASSES = 12


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Findings from a bounded part of a data set.

    Attributes:
        finding: One line: examples, classes, shape, values.
        notes: Warnings for the user, a line each.
    """

    finding: str
    notes: tuple[str, ...] = ()


def summarise(spec: Data) -> Summary:
    """Read a bounded part of a data set with the reader that training uses, and summarise it.

    Raises:
        ConfigError: It cannot be trained on; the message is the one that a task would fail with.
    """
    most = min(MOST_CELLS if spec.source == "csv" else MOST_VALUES, max(1, available_bytes() // SHARE_OF_MEMORY))
    part = read_part(spec, most)
    is_whole = len(part.arrays) == len(part.labels) and not (spec.source == "csv" and part.arrays.inputs.size >= most)
    arrays, labels, extent = part.arrays, part.labels, ""
    if is_whole and spec.partition is not None:
        extent = f" (this device's share of {len(part.labels)})"
        arrays = take_share(arrays, spec.partition)
        labels = arrays.labels
    notes = [*part.notes, *_find_warnings(spec, labels, part.arrays, is_whole=is_whole)]
    if not is_whole:
        amount = f"the first {len(arrays)} examples" if spec.source != "folder" else f"{len(arrays)} of them"
        extent = f"; read were {amount}, {arrays.inputs.nbytes / MIB:.0f} MiB"
    count = f"more than {len(labels)}" if not is_whole and spec.source == "csv" else str(len(labels))
    return Summary(finding=f"{count} examples{extent}{_describe(spec, arrays, labels, part)}", notes=tuple(notes))


def _describe(spec: Data, arrays: Arrays, labels: np.ndarray[tuple[int], np.dtype[np.int64]], part: ReadPart) -> str:
    shape = "x".join(map(str, arrays.inputs.shape[1:]))
    low, high = float(arrays.inputs.min()), float(arrays.inputs.max())
    values = f"; shape {shape}, values {low:.4g} to {high:.4g}"
    if not spec.is_labelled:
        return f" without labels{values}"
    held_out = count_held_out(len(labels), spec.holdout)
    usage = f"; {count_training(len(labels), spec)} to train on, {held_out} held out" if held_out else ""
    return f" of {_count_classes(labels, spec.classes or part.arrays.classes)}{values}{usage}"


def _count_classes(labels: np.ndarray[tuple[int], np.dtype[np.int64]], names: tuple[str, ...]) -> str:
    numbers, counts = np.unique(labels, return_counts=True)
    class_counts = [
        f"{show_name(names[number]) if number < len(names) else number}: {count}"
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True)
    ]
    more = f" and {len(class_counts) - MOST_CLASSES} classes more" if len(class_counts) > MOST_CLASSES else ""
    noun = "class" if len(class_counts) == 1 else "classes"
    return f"{len(class_counts)} {noun} ({', '.join(class_counts[:MOST_CLASSES])}{more})"


def _find_warnings(
    spec: Data, labels: np.ndarray[tuple[int], np.dtype[np.int64]], arrays: Arrays, *, is_whole: bool
) -> list[str]:
    """List likely mistakes in data that can be trained on."""
    warnings = []
    if spec.is_labelled and is_whole and len(np.unique(labels)) == 1:
        warnings.append("all examples are of one class; nothing can be learnt from them alone")
    present = set(labels.tolist())
    names = spec.classes or arrays.classes or tuple(map(str, range(int(labels.max()) + 1)))
    absent = [name for number, name in enumerate(names) if number not in present]
    if spec.is_labelled and is_whole and absent:
        warnings.append(f"no example is of {format_class_names(absent)}; if other devices have them, all is well")
    if arrays.inputs.min() == arrays.inputs.max():
        warnings.append("all values are the same; look at the files")
    return warnings
