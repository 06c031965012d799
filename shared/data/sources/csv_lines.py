"""Bounded line reader for CSV tables with a header row, without torch or numpy."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from shared.data.name_text import normalise_name
from shared.data.spec import Data
from shared.errors import ConfigError

MAX_ROW_CHARS = 1 << 24
"""Limit of a row; a longer one, or a file without line ends, is not read to its end."""
SEPARATORS = (";", "\t", "|", ",")
MAX_LISTED = 12
_PANDAS_INDEX = re.compile(r"Unnamed: \d+")
"""Name that pandas gives to a column without a name, such as an index written by `to_csv`."""


def split_paths(spec: Data) -> tuple[Path, Path | None]:
    """Return the file to read and, if it exists, that of the other split.

    Raises:
        ConfigError: The test split is requested of a single file.
    """
    path = Path(spec.path)
    if path.is_dir():
        other = path / ("test.csv" if spec.split == "train" else "train.csv")
        return path / f"{spec.split}.csv", other if other.is_file() else None
    if spec.split == "test":
        raise ConfigError(
            f"{path}: one file has no test split; give a folder with train.csv and test.csv, or use holdout"
        )
    return path, None


def read_lines(path: Path, spec: Data) -> Iterator[tuple[int, list[str]]]:
    """Yield the header and every line that is not blank, each with its number; all have as many cells as the header.

    Raises:
        ConfigError: The file cannot be read, a line is too long or has other columns; the message names the line.
    """
    length = 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            chars = [0]
            reader = csv.reader(_bounded_lines(file, chars, path), delimiter=spec.separator or ",", strict=True)
            for cells in filter(None, reader):
                chars[0] = 0
                length = length or len(cells)
                if len(cells) != length:
                    problem = f"{len(cells)} cells, but the header has {length}"
                    raise ConfigError(f"{path}: line {reader.line_num}: {problem}; correct the line")
                yield reader.line_num, [cell.strip() for cell in cells]
    except csv.Error as error:
        raise ConfigError(f"{path}: line {reader.line_num}: {error}; correct the line") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text ({error}); save it as CSV in UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error}); correct path or the file's permissions") from error
    if not length:
        raise ConfigError(f"{path}: is empty; it needs a header row")


def _bounded_lines(file: TextIO, chars: list[int], path: Path) -> Iterator[str]:
    """Yield a file's lines; `chars` counts those of the current row, which quotes may spread over many lines."""
    while line := file.readline(MAX_ROW_CHARS):
        chars[0] += len(line)
        if chars[0] >= MAX_ROW_CHARS:
            raise ConfigError(f"{path}: a row of {MAX_ROW_CHARS} characters or more; correct path or the file")
        yield line


@dataclass(frozen=True)
class Columns:
    """Indices of a table's columns.

    Attributes:
        label: Column of the class; None where it is not read and absent.
        client: Column of the example's producer; None where none is configured.
        features: Columns of the numbers, in order.
    """

    label: int | None
    client: int | None
    features: tuple[int, ...]


def find_columns(header: list[str], path: Path, spec: Data) -> Columns:
    """Locate the label, client and feature columns; a label that is not read may be missing.

    Raises:
        ConfigError: A column is missing, duplicate, or has no name, or there are no features.
    """
    skipped = set(spec.skip_columns or ())
    names = [name for name in header if name not in skipped]
    if unknown := sorted(skipped - set(header)):
        raise ConfigError(
            f"{path}: has no column {unknown[0]!r} to leave out, only {_format_names(header)}; correct skip_columns"
        )
    if twice := sorted({name for name in names if name and names.count(name) > 1}):
        raise ConfigError(f"{path}: has two columns {twice[0]!r}; rename one")
    for key, name in (("label_column", spec.label_column), ("client_column", spec.client_column)):
        needed = spec.reads_labels if key == "label_column" else bool(name)
        if needed and name not in names:
            remedy = _find_separator(header, name, spec) or f"correct {key} or the header"
            raise ConfigError(f"{path}: has no column {name!r}, only {_format_names(header)}; {remedy}")
    if spec.label_column == spec.client_column:
        raise ConfigError(f"{path}: label_column and client_column are both {spec.label_column!r}; correct one")
    label, client = (
        header.index(name) if name in names and name else None for name in (spec.label_column, spec.client_column)
    )
    features = tuple(at for at, name in enumerate(header) if name not in skipped and at not in (label, client))
    _require_names({at: header[at] for at in features}, path)
    if not features:
        raise ConfigError(f"{path}: has no columns of features beside the label; add some")
    return Columns(label, client, features)


def _require_names(features: Mapping[int, str], path: Path) -> None:
    """Refuse features without a name, such as the index column that pandas writes."""
    for at, name in features.items():
        if not name or _PANDAS_INDEX.fullmatch(name):
            what = f"is called {name!r}, as pandas calls one without a name" if name else "has no name"
            remedy = f'name it, write the file with index=False, or leave it out: skip_columns = ["{name}"]'
            raise ConfigError(f"{path}: column {at + 1} {what}; {remedy}")


def _format_names(header: list[str]) -> str:
    more = f" and {len(header) - MAX_LISTED} more" if len(header) > MAX_LISTED else ""
    return ", ".join(header[:MAX_LISTED]) + more


def _find_separator(header: list[str], name: str, spec: Data) -> str:
    """Suggest the separator with which the header has a column of that name; empty where none fits."""
    text = (spec.separator or ",").join(header)
    for separator in SEPARATORS:
        if name in (cell.strip(' "') for cell in text.split(separator)):
            return f"set separator = {separator!r}".replace("'", '"')
    return ""


def require_text(cell: str, path: Path, line: int, column: str) -> str:
    """Return a cell, refusing an empty one.

    Args:
        line: Line number in the file, for the error.

    Raises:
        ConfigError: It is empty.
    """
    if not cell:
        raise ConfigError(f"{path}: line {line}, column {column!r}: empty; fill it in or remove the line")
    return cell


def read_labels(path: Path, spec: Data) -> Iterator[str]:
    """Yield the normalised label of every line.

    Raises:
        ConfigError: As `read_lines` and `find_columns`, or a label is empty.
    """
    lines = read_lines(path, spec)
    _, header = next(lines)
    label_at = find_columns(header, path, spec).label
    assert label_at is not None, "called only where labels are read"
    return (normalise_name(require_text(cells[label_at], path, line, spec.label_column)) for line, cells in lines)
