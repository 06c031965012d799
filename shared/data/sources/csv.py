"""A table of numbers with a header row: one example a line, its class in one column, perhaps its client in another.

The path is one file, or a folder with `train.csv` and `test.csv`. Classes that are integers from 0 keep their numbers,
so that devices which lack a class still agree. Other classes are numbered in the order of their names, those of both
files where there are two, unless `classes` names them all.
"""

from __future__ import annotations

import math
from array import array
from pathlib import Path

import numpy as np

from shared.data.classes import names_of, number_labels
from shared.data.sources.arrays import Arrays, as_inputs
from shared.data.sources.csv_lines import find_columns, labels_of, read_lines, require_text, split_paths
from shared.data.spec import Data
from shared.errors import ConfigError
from shared.runtime.memory import require_room

FLOAT32_MAX = float(np.finfo(np.float32).max)
CHECKED_EVERY = 1 << 18
"""Features between two looks at the memory that is left."""


def read(spec: Data) -> Arrays:
    """Return one split: inputs of shape (N, features), labels of shape (N,), and the clients if a column names them.

    Raises:
        ConfigError: A file is missing, or a line or column is not as expected; the message names both.
    """
    path, sibling = split_paths(spec)
    columns, features, labels, clients = _table(path, spec)
    inputs = as_inputs(np.frombuffer(features, dtype=np.float32).reshape(-1, columns))
    people = tuple(clients) if spec.client_column else None
    if not spec.reads_labels:
        return Arrays.unlabelled(inputs, people)
    known = set(labels) if sibling is None or spec.classes else {*labels, *labels_of(sibling, spec)}
    number = number_labels(known, spec, path)
    return Arrays(
        inputs,
        np.array([number[label] for label in labels], dtype=np.int64),
        people,
        classes=names_of(number),
    )


def _table(path: Path, spec: Data) -> tuple[int, array[float], list[str], list[str]]:
    """Return how many features a line has, those of all lines in one row, the labels if they are read, the clients."""
    features, labels, clients = array("f"), list[str](), list[str]()
    lines = read_lines(path)
    _, header = next(lines)
    label_at, client_at = find_columns(header, path, spec)
    texts = {client_at: clients, label_at: labels if spec.reads_labels else None}
    checked = 0
    for line, cells in lines:
        if len(features) >= checked:
            require_room(2 * features.itemsize * len(features), path)  # as long again for the inputs made of them
            checked = len(features) + CHECKED_EVERY
        for at, (column, cell) in enumerate(zip(header, cells, strict=True)):
            if at not in texts:
                features.append(_number(cell, path, line, column))
            elif (kept := texts[at]) is not None:
                kept.append(require_text(cell, path, line, column))
    if not features:
        raise ConfigError(f"{path}: has a header but no line below it; add examples or correct path")
    return len(header) - len(texts.keys() - {None}), features, labels, clients


def _number(cell: str, path: Path, line: int, column: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if abs(value) <= FLOAT32_MAX:  # false for NaN
        return value
    raise ConfigError(f"{path}: line {line}, column {column!r}: {cell!r} is no finite number; correct it")
