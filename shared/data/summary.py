"""Data set summary for users: class counts, shape, value range, skipped files."""

from __future__ import annotations

import msgspec
import numpy as np

from shared.data.classes import format_class_names
from shared.data.name_text import show_name
from shared.data.partition import take_share
from shared.data.sources.arrays import Arrays, Labels, ReadPart, count_sides
from shared.data.sources.read import read_part
from shared.data.spec import TABLES, Data
from shared.runtime.memory import MIB, available_bytes

MOST_VALUES, MOST_CELLS = 1 << 26, 1 << 22
"""Limit of input values to read; lower for tables, whose cells take longer."""
SHARE_OF_MEMORY = 16
MOST_CLASSES, MOST_TARGETS = 12, 4
QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Quantiles of targets that are shown."""


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
    most = most_values(spec)
    return summarise_part(spec, read_part(spec, most), most)


def summarise_part(spec: Data, part: ReadPart, most: int) -> Summary:
    """Summarise what was read with at most `most` values; raise as `summarise`."""
    reads_all = is_whole(spec, part, most)
    arrays, labels, extent = part.arrays, part.labels, ""
    if reads_all and spec.partition is not None:
        extent = f" (this device's share of {len(part.labels)})"
        arrays = take_share(arrays, spec.partition)
        labels = arrays.labels
    notes = [*part.notes, *find_warnings(spec, labels, part.arrays, is_whole=reads_all)]
    if not reads_all:
        amount = f"{'' if spec.source in ('folder', 'audio') else 'the first '}{len(arrays)} of them"
        extent = f" ({amount} were read, {arrays.inputs.nbytes / MIB:.0f} MiB)"
    count = f"more than {len(labels)}" if not reads_all and spec.source in TABLES else str(len(labels))
    return Summary(finding=f"{count} examples{extent}{_describe(spec, arrays, labels, part)}", notes=tuple(notes))


def is_whole(spec: Data, part: ReadPart, most: int) -> bool:
    """Return true if what was read with at most `most` values is the whole data set."""
    return len(part.arrays) == len(part.labels) and not (spec.source in TABLES and part.arrays.inputs.size >= most)


def most_values(spec: Data) -> int:
    """Return the limit of input values to read for a check."""
    most = MOST_CELLS if spec.source in TABLES else MOST_VALUES
    return min(most, max(1, available_bytes() // SHARE_OF_MEMORY))


def _describe(spec: Data, arrays: Arrays, labels: Labels, part: ReadPart) -> str:
    shape = "x".join(map(str, arrays.inputs.shape[1:]))
    low, high = float(arrays.inputs.min()), float(arrays.inputs.max())
    values = f"; shape {shape}, values {low:.4g} to {high:.4g}"
    if not spec.is_labelled:
        return f" without labels{values}"
    held_out, training = count_sides(len(labels), arrays.identities, spec)
    usage = f"; {training} to train on, {held_out} held out" if held_out else ""
    return f" {_describe_targets(labels, spec.classes or part.arrays.classes)}{values}{usage}"


def _describe_targets(labels: Labels, names: tuple[str, ...]) -> str:
    if labels.dtype == np.float32:
        columns = [
            " ".join(f"{value:.4g}" for value in np.quantile(column, QUANTILES)) for column in labels.T[:MOST_TARGETS]
        ]
        more = f" and {labels.shape[1] - MOST_TARGETS} more" if labels.shape[1] > MOST_TARGETS else ""
        noun = "target" if labels.shape[1] == 1 else "targets"
        return f"of {labels.shape[1]} {noun} (minimum, quartiles, maximum: {'; '.join(columns)}{more})"
    numbers, counts = np.unique(labels, return_counts=True)
    is_mask = labels.ndim > 1
    shares = [f"{count / labels.size:.1%}" if is_mask else str(count) for count in counts.tolist()]
    class_counts = [
        f"{show_name(names[number]) if number < len(names) else number}: {share}"
        for number, share in zip(numbers.tolist(), shares, strict=True)
    ]
    more = f" and {len(class_counts) - MOST_CLASSES} classes more" if len(class_counts) > MOST_CLASSES else ""
    noun = "class" if len(class_counts) == 1 else "classes"
    return f"of {len(class_counts)} {noun}{' of pixels' * is_mask} ({', '.join(class_counts[:MOST_CLASSES])}{more})"


def find_warnings(spec: Data, labels: Labels, arrays: Arrays, *, is_whole: bool) -> list[str]:
    """List likely mistakes in data that can be trained on."""
    warnings = []
    if arrays.inputs.min() == arrays.inputs.max():
        warnings.append("all values are the same; look at the files")
    if not spec.is_labelled or not is_whole:
        return warnings
    if spec.holdout and not count_sides(len(labels), arrays.identities, spec)[0]:
        warnings.append("no example is held out: there are too few; add examples, or remove holdout")
    if spec.target_kind == "values":
        constant = np.flatnonzero(labels.min(axis=0) == labels.max(axis=0))
        problem = "is the same in all examples; look at the files"
        return [*(f"target {_name_target(spec, number)} {problem}" for number in constant.tolist()), *warnings]
    present = set(np.unique(labels).tolist())
    if len(present) == 1:
        warnings.insert(0, "all examples are of one class; nothing can be learnt from them alone")
    names = spec.classes or arrays.classes or tuple(map(str, range(int(labels.max()) + 1)))
    absent = [name for number, name in enumerate(names) if number not in present]
    if spec.target_kind == "mask" and len(absent) > len(present):
        highest = f"masks hold pixel values up to {max(present)}, and {len(absent)} below it are of no pixel"
        warnings.append(f"{highest}; number the classes from 0")
    elif absent:
        warnings.append(f"no example is of {format_class_names(absent)}; if other devices have them, all is well")
    return warnings


def _name_target(spec: Data, number: int) -> str:
    columns = spec.target_columns or ()
    return repr(columns[number % len(columns)]) if columns else f"number {number}"
