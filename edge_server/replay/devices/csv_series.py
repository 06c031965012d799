"""Time series in CSV files, several per file; errors name the line."""

from __future__ import annotations

import csv
import gzip
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TextIO, TypeAlias

from shared.errors import ConfigError

TIME = "t_s"


Row: TypeAlias = tuple[int, float, float]
"""Line number, second, value; NaN for a cell that is not a number."""
Where: TypeAlias = tuple[tuple[str, str], ...]
"""Pairs of a column and its required value."""


@lru_cache(maxsize=32)
def read_columns(path: str) -> tuple[str, ...]:
    """Return the columns of a file.

    Raises:
        ConfigError: The file is missing, unreadable or empty.
    """
    with _open_rows(path) as rows:
        return tuple(_header(path, rows))


@lru_cache(maxsize=32)
def read_series(path: str, key: str, column: str, where: Where = ()) -> Mapping[str, list[Row]]:
    """Return the rows of a column grouped by the values of `key`, in file order; empty cells are skipped.

    Args:
        key: Column that names a row's series.
        where: Rows must match all these pairs.

    Raises:
        ConfigError: The file is missing, unreadable or empty, or lacks a column.
    """
    rows_by_key: dict[str, list[Row]] = {}
    with _open_rows(path) as rows:
        header = _header(path, rows)
        required = (key, TIME, column, *(name for name, _ in where))
        if missing := [name for name in required if name not in header]:
            raise ConfigError(f"{path}: no column {missing[0]!r}; the file has {', '.join(header)}")
        at_key, at_time, at_value, *others = (header.index(name) for name in required)
        conditions = list(zip(others, (value for _, value in where), strict=True))
        last = max(at_key, at_time, at_value, *others)
        for line, row in enumerate(rows, 2):
            if not row:
                continue
            if len(row) <= last:
                raise ConfigError(f"{path}:{line}: {len(row)} of {len(header)} columns; complete the row or remove it")
            if row[at_value] and all(row[at] == value for at, value in conditions):
                rows_by_key.setdefault(row[at_key], []).append((line, _number(row[at_time]), _number(row[at_value])))
    return rows_by_key


def choose_name(path: str, rows_by_name: Mapping[str, list[Row]], name: str, index: int) -> str:
    """Return `name`; if it is empty, the name of series `index`, modulo their number.

    Raises:
        ConfigError: There is no series of that name, or none at all.
    """
    if not rows_by_name:
        raise ConfigError(f"{path}: no row matches; correct `where` or the file")
    name = name or list(rows_by_name)[index % len(rows_by_name)]
    if name not in rows_by_name:
        raise ConfigError(f"{path}: no series {name!r}; the file has {_list_names(rows_by_name)}")
    return name


def require_valid_series(path: str, name: str, rows: Iterable[Row]) -> None:
    """Reject a series with invalid times or values.

    Raises:
        ConfigError: Time runs backwards, or a figure is negative, not finite or not a number.
    """
    latest = -math.inf
    for line, t, value in rows:
        if not (math.isfinite(t) and 0 <= value < math.inf):
            raise ConfigError(f"{path}:{line}: {name!r}: not a number, not finite or negative; correct the row")
        if t < latest:
            raise ConfigError(
                f"{path}:{line}: {name!r}: time runs backwards, {t:g} s after {latest:g} s; "
                "sort the rows, name another series, or separate two series with `where`"
            )
        latest = t


def average_by_second(rows: Iterable[Row]) -> list[tuple[float, float]]:
    """Return (second, value) pairs from second 0 on; values of the same second are averaged."""
    merged: list[tuple[float, list[float]]] = []
    for _, t, value in rows:
        if merged and merged[-1][0] == t:
            merged[-1][1].append(value)
        else:
            merged.append((t, [value]))
    return [(t - merged[0][0], math.fsum(values) / len(values)) for t, values in merged]


def _list_names(names: Mapping[str, object], most: int = 5) -> str:
    return ", ".join([*list(names)[:most], *(["..."] if len(names) > most else [])])


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _header(path: str, rows: Iterator[list[str]]) -> list[str]:
    header = next(rows, [])
    if not header:
        raise ConfigError(f"{path}: empty; give the path of a recorded trace")
    return header


@contextmanager
def _open_rows(path: str) -> Iterator[Iterator[list[str]]]:
    open_text: Callable[..., TextIO] = gzip.open if path.endswith(".gz") else open
    try:
        with open_text(Path(path), "rt", encoding="utf-8", newline="") as file:
            yield csv.reader(file)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give the path of a trace, relative to the data root") from None
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read as a CSV file ({error}); restore it from a copy") from error
