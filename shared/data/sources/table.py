"""Examples from the rows of a table: class numbers, target columns, windows by time.

CSV, Parquet and SQLite readers fill a `TableRows`; from there on all tables are treated alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shared.data.classes import number_labels, order_names
from shared.data.identity import hash_texts
from shared.data.name_text import normalise_name
from shared.data.sources.arrays import Arrays, Labels, ReadPart, no_labels
from shared.data.sources.time_windows import TimeWindows, cut_windows, require_order
from shared.data.sources.timestamps import parse_times
from shared.data.spec import Data


@dataclass(frozen=True, slots=True, eq=False)
class TableRows:
    """Rows of a table in the order of the file.

    Attributes:
        features: float32 of shape (R, features).
        targets: float32 of shape (R, targets); no column where none is read.
        labels: Class of each row; empty where none is read.
        clients: Producer of each row; empty where no column names it.
        times: Time of each row as in the file; empty where no column holds it.
        lines: Number of each row in the file, for messages, int64 of shape (R,).
        notes: Warnings for the user.
    """

    features: NDArray[np.float32]
    targets: NDArray[np.float32]
    labels: list[str]
    clients: list[str]
    times: list[str]
    lines: NDArray[np.int64]
    notes: tuple[str, ...] = ()


def make_examples(table: TableRows, spec: Data, path: Path, other_labels: Iterable[str] = ()) -> ReadPart:
    """Make examples of a table's rows, or of windows of them.

    Args:
        other_labels: Normalised labels of the other split, which are numbered too.

    Raises:
        ConfigError: A label or time is invalid, times are out of order, or no window fits.
    """
    seconds = parse_times(table.times, table.lines, spec, path) if spec.time_column else None
    if seconds is not None:
        require_order(seconds, table.clients, table.lines, spec, path)
    labels, classes = _read_labels(table, spec, path, other_labels)
    if spec.window:
        return _make_windows(
            table, labels, classes, cut_windows(table.clients, seconds, len(table.features), spec, path)
        )
    clients = tuple(table.clients) if spec.client_column else None
    arrays = Arrays(table.features, labels, clients, classes, _identify_rows(table, seconds, spec))
    return ReadPart(arrays, labels, table.notes)


def _read_labels(
    table: TableRows, spec: Data, path: Path, other_labels: Iterable[str]
) -> tuple[Labels, tuple[str, ...]]:
    if not spec.reads_labels:
        return no_labels(len(table.features)), ()
    if spec.target_columns:
        return table.targets, ()
    names = {label: normalise_name(label) for label in set(table.labels)}
    number = number_labels({*names.values(), *other_labels}, spec, path, f"column {spec.label_column!r}")
    numbers = {label: number[name] for label, name in names.items()}
    values = np.fromiter(map(numbers.__getitem__, table.labels), dtype=np.int64, count=len(table.labels))
    return values, order_names(number)


def _identify_rows(table: TableRows, seconds: NDArray[np.float64] | None, spec: Data) -> NDArray[np.uint64] | None:
    if not spec.is_held_out_by_hash or seconds is None:
        return None  # then the content identifies a row
    clients = table.clients or [""] * len(table.features)
    return hash_texts(f"{client}/{second!r}" for client, second in zip(clients, seconds.tolist(), strict=True))


def _make_windows(table: TableRows, labels: Labels, classes: tuple[str, ...], windows: TimeWindows) -> ReadPart:
    inputs = windows.inputs(table.features)
    targets = windows.targets(labels) if labels.ndim > 1 else labels[windows.last]
    clients = tuple(table.clients[row] for row in windows.last.tolist()) if table.clients else None
    arrays = Arrays(inputs, targets, clients, classes, windows.identities)
    return ReadPart(arrays, targets, (*table.notes, *windows.notes))
