"""CSV tables with a header row, one example per line.

The path is one file, or a folder with `train.csv` and `test.csv`. Classes that are integers from 0 keep their numbers,
so that devices which lack a class still agree. Other classes are numbered in the order of their names, those of both
files where there are two, unless `classes` names them all. A label with a leading zero is a name: "01" is not 1.
"""

from __future__ import annotations

import math
import re
from array import array
from pathlib import Path

import numpy as np

from shared.data.classes import number_labels, order_names
from shared.data.name_text import normalise_name
from shared.data.sources.arrays import Arrays, ReadPart, as_inputs, no_labels
from shared.data.sources.csv_lines import find_columns, read_labels, read_lines, require_text, split_paths
from shared.data.spec import Data
from shared.errors import ConfigError
from shared.runtime.memory import require_room

FLOAT32_MAX = float(np.finfo(np.float32).max)
_NUMBER = re.compile(r"[+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?")
"""Python's float would accept more: "1_5" as 15, digits of other scripts."""
CHECKED_EVERY = 1 << 18
"""Features between two checks of the available memory."""


def read(spec: Data) -> Arrays:
    """Read one split: inputs of shape (N, features), labels of shape (N,), and the clients if a column names them.

    Raises:
        ConfigError: A file is missing, or a line or column is not as expected; the message names both.
    """
    return read_part(spec).arrays


def read_part(spec: Data, most: int | None = None) -> ReadPart:
    """Read the first lines, with at most `most` features in all; None for no limit.

    Raises:
        ConfigError: A file is missing, or a line or column is not as expected.
    """
    path, sibling = split_paths(spec)
    columns, features, labels, clients = _read_table(path, spec, most)
    inputs = as_inputs(np.frombuffer(features, dtype=np.float32).reshape(-1, columns))
    people = tuple(clients) if spec.client_column else None
    if not spec.reads_labels:
        return ReadPart(Arrays.from_inputs(inputs, people), no_labels(len(inputs)))
    labels = list(map(normalise_name, labels))
    all_labels = set(labels) if sibling is None or spec.classes else {*labels, *read_labels(sibling, spec)}
    number = number_labels(all_labels, spec, path, f"column {spec.label_column!r}")
    numbers = np.array([number[label] for label in labels], dtype=np.int64)
    return ReadPart(Arrays(inputs, numbers, people, classes=order_names(number)), numbers)


def _read_table(path: Path, spec: Data, most: int | None) -> tuple[int, array[float], list[str], list[str]]:
    """Read the number of features per line, all features as one row, the labels if they are read, and the clients."""
    features, labels, clients = array("f"), list[str](), list[str]()
    lines = read_lines(path, spec)
    _, header = next(lines)
    columns = find_columns(header, path, spec)
    texts = [(columns.client, clients)] if columns.client is not None else []
    if columns.label is not None and spec.reads_labels:
        texts.append((columns.label, labels))
    checked = 0
    for line, cells in lines:
        if most is not None and features and len(features) >= most:
            break
        if len(features) >= checked:
            require_room(2 * features.itemsize * len(features), path)  # as long again for the inputs made of them
            checked = len(features) + CHECKED_EVERY
        features.extend([_parse_number(cells[at], path, line, header[at]) for at in columns.features])
        for at, column in texts:
            column.append(require_text(cells[at], path, line, header[at]))
    if not features:
        raise ConfigError(f"{path}: has a header but no line below it; add examples or correct path")
    return len(columns.features), features, labels, clients


def _parse_number(cell: str, path: Path, line: int, column: str) -> float:
    try:
        value = float(cell) if _NUMBER.fullmatch(cell) else math.nan
    except ValueError:
        value = math.nan
    if abs(value) <= FLOAT32_MAX:  # false for NaN
        return value
    remedy = "correct it, or leave the column out by skip_columns"
    if not cell:
        raise ConfigError(f"{path}: line {line}, column {column!r}: empty; fill it in or remove the line")
    if "," in cell and _NUMBER.fullmatch(cell.replace(",", ".", 1)):
        remedy = "write decimals with a point"
    raise ConfigError(f"{path}: line {line}, column {column!r}: {cell!r} is not a finite number; {remedy}")
