"""Bounded line reader for CSV tables with a header row, without torch or numpy."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from shared.data.name_text import normalise_name
from shared.data.sources.columns import find_columns
from shared.data.spec import EVALUATE_ON_DEVICES, Data
from shared.errors import ConfigError, describe_cause

MAX_ROW_CHARS = 1 << 24
"""Limit of a row; a longer one, or a file without line ends, is not read to its end."""


def split_paths(spec: Data, suffix: str = ".csv") -> tuple[Path, Path | None]:
    """Return the file to read and, if it exists, that of the other split.

    Raises:
        ConfigError: The test split is requested of a single file.
    """
    path = Path(spec.path)
    if path.is_dir():
        other = path / f"{'test' if spec.split == 'train' else 'train'}{suffix}"
        return path / f"{spec.split}{suffix}", other if other.is_file() else None
    if spec.split == "test":
        raise ConfigError(
            f"{path}: one file has no test split; give a folder with train{suffix} and test{suffix}, "
            f"{EVALUATE_ON_DEVICES}"
        )
    return path, None


def require_file(path: Path) -> None:
    """Refuse a path that would block its reader, such as a pipe.

    Raises:
        ConfigError: It is neither missing nor a regular file.
    """
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path}: is not a file; correct path")
    except OSError as error:  # a loop of symbolic links
        raise ConfigError(f"{path}: cannot be read ({describe_cause(error)}); correct path") from error


def read_lines(path: Path, spec: Data) -> Iterator[tuple[int, list[str]]]:
    """Yield the header and every line that is not blank, each with its number; all have as many cells as the header.

    Raises:
        ConfigError: The file cannot be read, a line is too long or has other columns; the message names the line.
    """
    length = 0
    require_file(path)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            chars = [0]
            lines = _bounded_lines(file, chars, path, drops_unfinished=bool(spec.growing))
            reader = csv.reader(lines, delimiter=spec.separator or ",", strict=True)
            for cells in filter(None, reader):
                chars[0] = 0
                length = length or len(cells)
                if len(cells) != length:
                    raise _refuse_count(cells, length, f"{path}: line {reader.line_num}", spec)
                yield reader.line_num, [cell.strip() for cell in cells]
    except csv.Error as error:
        raise ConfigError(f"{path}: line {reader.line_num}: {error}; correct the line") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text ({error}); save it as CSV in UTF-8") from error
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({describe_cause(error)}); correct path or the file's permissions"
        ) from error
    if not length:
        raise ConfigError(f"{path}: is empty; it needs a header row")


def _refuse_count(cells: list[str], length: int, place: str, spec: Data) -> ConfigError:
    """Return the error of a line with another number of cells than the header."""
    if any("\0" in cell for cell in cells):
        return ConfigError(f"{place}: zero bytes, as a power cut leaves them; remove the line")
    separator = spec.separator or ","
    quotes = f", or quote cells that contain the separator {separator!r}" if len(cells) > length else ""
    return ConfigError(f"{place}: {len(cells)} cells, but the header has {length}; correct the line{quotes}")


def _bounded_lines(file: TextIO, chars: list[int], path: Path, *, drops_unfinished: bool) -> Iterator[str]:
    """Yield a file's lines; `chars` counts those of the current row, which quotes may spread over many lines.

    Args:
        drops_unfinished: Whether a last line without a line end is dropped, since it is being written.
    """
    while line := file.readline(MAX_ROW_CHARS):
        if drops_unfinished and line[-1] not in "\r\n" and len(line) < MAX_ROW_CHARS:
            return
        chars[0] += len(line)
        if chars[0] >= MAX_ROW_CHARS:
            raise ConfigError(f"{path}: a row of {MAX_ROW_CHARS} characters or more; correct path or the file")
        yield line


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
