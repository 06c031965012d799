"""A table of numbers with a header row: one example a line, its class in one column, perhaps its client in another.

The path is one file, or a folder with `train.csv` and `test.csv`. Classes that are integers from 0 keep their numbers,
so that devices which lack a class still agree. Other classes are numbered in the order of their names, those of both
files where there are two.
"""

from __future__ import annotations

import csv
import math
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from shared.data.examples import Examples, as_inputs
from shared.data.spec import Data
from shared.errors import ConfigError

FLOAT32_MAX = float(np.finfo(np.float32).max)
MAX_DIGITS = 9
"""Longer numbers are names."""


def read(spec: Data) -> Examples:
    """Return one split: inputs of shape (N, features), labels of shape (N,), and the clients if a column names them.

    Raises:
        ConfigError: A file is missing, or a line or column is not as expected; the message names both.
    """
    path, sibling = _paths(spec)
    features, labels, clients = _table(path, spec)
    known = set(labels) if sibling is None else {*labels, *_labels(sibling, spec)}
    number = _numbering(known)
    inputs = np.frombuffer(features, dtype=np.float32).reshape(len(labels), -1)
    return Examples(
        as_inputs(inputs),
        torch.tensor([number[label] for label in labels], dtype=torch.int64),
        tuple(clients) if spec.client_column else None,
    )


def _paths(spec: Data) -> tuple[Path, Path | None]:
    """Return the file to read and, if there is one, that of the other split."""
    path = Path(spec.path)
    if path.is_dir():
        other = path / ("test.csv" if spec.split == "train" else "train.csv")
        return path / f"{spec.split}.csv", other if other.is_file() else None
    if spec.split == "test":
        raise ConfigError(
            f"{path}: one file has no test split; give a folder with train.csv and test.csv, or use holdout"
        )
    return path, None


def _table(path: Path, spec: Data) -> tuple[array[float], list[str], list[str]]:
    """Return the features of all lines in one row, the labels and the clients."""
    features, labels, clients = array("f"), [], []
    lines = _lines(path)
    _, header = next(lines)
    label_at, client_at = _columns(header, path, spec)
    for line, cells in lines:
        for at, (column, cell) in enumerate(zip(header, cells, strict=True)):
            if at == label_at:
                labels.append(_text(cell, path, line, column))
            elif at == client_at:
                clients.append(_text(cell, path, line, column))
            else:
                features.append(_number(cell, path, line, column))
    if not labels:
        raise ConfigError(f"{path}: has a header but no line below it; add examples or correct path")
    return features, labels, clients


def _labels(path: Path, spec: Data) -> set[str]:
    lines = _lines(path)
    _, header = next(lines)
    label_at, _ = _columns(header, path, spec)
    return {_text(cells[label_at], path, line, spec.label_column) for line, cells in lines}


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the header and every line that is not blank, each with its number; all are as long as the header."""
    length = 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            for cells in filter(None, reader):
                length = length or len(cells)
                if len(cells) != length:
                    problem = f"{len(cells)} cells, but the header has {length}"
                    raise ConfigError(f"{path}: line {reader.line_num}: {problem}; correct the line")
                yield reader.line_num, [cell.strip() for cell in cells]
    except csv.Error as error:
        raise ConfigError(f"{path}: line {reader.line_num}: {error}; correct the line") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text ({error}); correct path or the file") from error
    if not length:
        raise ConfigError(f"{path}: is empty; it needs a header row")


def _columns(header: list[str], path: Path, spec: Data) -> tuple[int, int | None]:
    """Return where the label and the client are."""
    if twice := sorted({name for name in header if header.count(name) > 1}):
        raise ConfigError(f"{path}: has two columns {twice[0]!r}; rename one")
    for key, name in (("label_column", spec.label_column), ("client_column", spec.client_column)):
        if name not in header and (name or key == "label_column"):
            raise ConfigError(f"{path}: has no column {name!r}, only {', '.join(header)}; correct {key} or the header")
    if spec.label_column == spec.client_column:
        raise ConfigError(f"{path}: label_column and client_column are both {spec.label_column!r}; correct one")
    client_at = header.index(spec.client_column) if spec.client_column else None
    if len(header) == (1 if client_at is None else 2):
        raise ConfigError(f"{path}: has no columns of features beside the label; add some")
    return header.index(spec.label_column), client_at


def _text(cell: str, path: Path, line: int, column: str) -> str:
    if not cell:
        raise ConfigError(f"{path}: line {line}, column {column!r}: empty; fill it in or remove the line")
    return cell


def _number(cell: str, path: Path, line: int, column: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if abs(value) <= FLOAT32_MAX:  # false for NaN
        return value
    raise ConfigError(f"{path}: line {line}, column {column!r}: {cell!r} is no finite number; correct it")


def _numbering(labels: set[str]) -> dict[str, int]:
    """Return every class's number: itself if all are numbers from 0, else its rank among the names."""
    if all(label.isascii() and label.isdigit() and len(label) <= MAX_DIGITS for label in labels):
        return {label: int(label) for label in labels}
    return {label: rank for rank, label in enumerate(sorted(labels))}
