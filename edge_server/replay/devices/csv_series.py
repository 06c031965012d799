"""Recorded series in a CSV file, many in one file: read once, row by row, whatever is wrong told with its line."""

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
"""The line it stands in, its second, and its value; not a number where one is none."""
Where: TypeAlias = tuple[tuple[str, str], ...]
"""Columns, and what they must hold."""


@lru_cache(maxsize=32)
def read_columns(path: str) -> tuple[str, ...]:
    """Return the columns of a file.

    Raises:
        ConfigError: It is missing or unreadable, or empty.
    """
    with _open_rows(path) as rows:
        return tuple(_header(path, rows))


@lru_cache(maxsize=32)
def read_series(path: str, key: str, column: str, where: Where = ()) -> Mapping[str, list[Row]]:
    """Return the values of a column by what the column `key` says, in the file's order; empty cells are no values.

    Args:
        key: Column that names a row's series.
        column: Column of the values.
        where: Pairs of a column and the value that rows must have there.

    Raises:
        ConfigError: The file is missing or unreadable, empty, or without one of the columns.
    """
    rows_by_key: dict[str, list[Row]] = {}
    with _open_rows(path) as rows:
        header = _header(path, rows)
        required = (key, TIME, column, *(name for name, _ in where))
        if missing := [name for name in required if name not in header]:
            raise ConfigError(f"{path}: no column {missing[0]!r}; it has {', '.join(header)}")
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
    """Return that name; where it is empty, the `index`-th of the file, counted again from its begin.

    Args:
        path: The file, for the error.
        rows_by_name: Its series by name.
        name: The one asked for; empty for the `index`-th.

    Raises:
        ConfigError: There is no series of that name, or none at all.
    """
    if not rows_by_name:
        raise ConfigError(f"{path}: no row fits; correct `where`, or the file")
    name = name or list(rows_by_name)[index % len(rows_by_name)]
    if name not in rows_by_name:
        raise ConfigError(f"{path}: there is no {name!r}; it has {_list_names(rows_by_name)}")
    return name


def require_valid_series(path: str, name: str, rows: Iterable[Row]) -> None:
    """Refuse a series that says what cannot be.

    Args:
        path: The file, for the error.
        rows: Seconds and values, as text.

    Raises:
        ConfigError: Time runs backwards, or a figure is no number, not finite or below zero.
    """
    latest = -math.inf
    for line, t, value in rows:
        if not (math.isfinite(t) and 0 <= value < math.inf):
            raise ConfigError(f"{path}:{line}: {name!r}: a figure is no number, or below zero; correct it")
        if t < latest:
            raise ConfigError(
                f"{path}:{line}: {name!r}: time runs backwards, {t:g} s after {latest:g} s; "
                "sort the rows, name another one, or tell two series apart by `where`"
            )
        latest = t


def mean_by_moment(rows: Iterable[Row]) -> list[tuple[float, float]]:
    """Return the moments from 0 on and their values; those of one moment are their mean."""
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
        raise ConfigError(f"{path}: no such file; give the path of a recorded trace, from the data root on") from None
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read as a CSV file ({error}); give it again") from error
