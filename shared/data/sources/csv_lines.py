"""Lines of a CSV table with a header row, read one by one and bounded; loads neither torch nor numpy."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from shared.data.spec import Data
from shared.errors import ConfigError

MAX_ROW_CHARS = 1 << 24
"""A longer row, or a file without line ends, is no table of examples, and is not read to its end."""


def split_paths(spec: Data) -> tuple[Path, Path | None]:
    """Return the file to read and, if there is one, that of the other split.

    Raises:
        ConfigError: One file cannot have a test split.
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


def read_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the header and every line that is not blank, each with its number; all are as long as the header.

    Raises:
        ConfigError: The file cannot be read, a line is too long or has other columns; the message names the line.
    """
    length = 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            chars = [0]
            reader = csv.reader(_bounded_lines(file, chars, path), strict=True)
            for cells in filter(None, reader):
                chars[0] = 0
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


def _bounded_lines(file: TextIO, chars: list[int], path: Path) -> Iterator[str]:
    """Yield a file's lines; `chars` counts those of the row under way, which quotes may spread over many lines."""
    while line := file.readline(MAX_ROW_CHARS):
        chars[0] += len(line)
        if chars[0] >= MAX_ROW_CHARS:
            raise ConfigError(f"{path}: a row of {MAX_ROW_CHARS} characters or more; correct path or the file")
        yield line


def find_columns(header: list[str], path: Path, spec: Data) -> tuple[int | None, int | None]:
    """Return where the label and the client are; a label that is not read may be missing.

    Args:
        header: Names of the columns.
        path: Of the file.
        spec: Says what the two columns are called.

    Raises:
        ConfigError: A column is missing, or there twice, or there is none beside.
    """
    if twice := sorted({name for name in header if header.count(name) > 1}):
        raise ConfigError(f"{path}: has two columns {twice[0]!r}; rename one")
    for key, name in (("label_column", spec.label_column), ("client_column", spec.client_column)):
        needed = spec.reads_labels if key == "label_column" else bool(name)
        if needed and name not in header:
            raise ConfigError(f"{path}: has no column {name!r}, only {', '.join(header)}; correct {key} or the header")
    if spec.label_column == spec.client_column:
        raise ConfigError(f"{path}: label_column and client_column are both {spec.label_column!r}; correct one")
    places = [header.index(name) if name in header else None for name in (spec.label_column, spec.client_column)]
    if len(header) == 2 - places.count(None):
        raise ConfigError(f"{path}: has no columns of features beside the label; add some")
    return places[0], places[1]


def require_text(cell: str, path: Path, line: int, column: str) -> str:
    """Return a cell that holds something.

    Args:
        cell: Its text.
        path: Of the file.
        line: Its line's number.
        column: Its column's name.

    Raises:
        ConfigError: It is empty.
    """
    if not cell:
        raise ConfigError(f"{path}: line {line}, column {column!r}: empty; fill it in or remove the line")
    return cell


def labels_of(path: Path, spec: Data) -> Iterator[str]:
    """Yield the label of every line.

    Raises:
        ConfigError: As `read_lines` and `find_columns`, or a label is empty.
    """
    lines = read_lines(path)
    _, header = next(lines)
    label_at, _ = find_columns(header, path, spec)
    assert label_at is not None, "whose labels are asked for, reads them"
    return (require_text(cells[label_at], path, line, spec.label_column) for line, cells in lines)
