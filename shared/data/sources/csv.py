"""CSV tables with a header row, one example or time step per line.

The path is one file, or a folder with `train.csv` and `test.csv`. Classes that are integers from 0 keep their numbers,
so that devices which lack a class still agree. Other classes are numbered in the order of their names, those of both
files where there are two, unless `classes` names them all. A label with a leading zero is a name: "01" is not 1.

Plain files are parsed by numpy in blocks. A file with quotes or a fault is read again line by line, which names the
fault.
"""

from __future__ import annotations

import math
import re
import warnings
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.data.sources.arrays import Arrays, ReadPart, is_finite
from shared.data.sources.columns import Columns, find_columns
from shared.data.sources.csv_lines import MAX_ROW_CHARS, read_labels, read_lines, require_text, split_paths
from shared.data.sources.table import TableRows, make_examples
from shared.data.spec import Data
from shared.errors import ConfigError
from shared.runtime.memory import require_room

FLOAT32_MAX = float(np.finfo(np.float32).max)
_NUMBER = re.compile(r"[+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?")
"""Python's float would accept more: "1_5" as 15, digits of other scripts."""
CHECKED_EVERY = 1 << 18
"""Numbers between two checks of the available memory."""
WHOLE_BYTES = 1 << 25
"""Size up to which numpy reads a file itself."""
BLOCK_BYTES = 1 << 18
"""Size of a block that numpy parses at once; its lines stay in a processor's cache."""
SHORT_CHARS, TIME_CHARS = 12, 33
"""Characters of a name or a time, and one, that numpy reads; columns with a longer cell are split in Python."""
TEXT_BYTES = 64
"""Memory of a short text."""


def read(spec: Data) -> Arrays:
    """Read one split: inputs of shape (N, features) or windows, labels, and the clients if a column names them.

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
    table = _read_plain(path, spec, most) if path.is_file() else None
    table = _read_rows(path, spec, most) if table is None else table
    if not len(table.features):
        raise ConfigError(f"{path}: has a header but no line below it; add examples or correct path")
    reads_both = sibling is not None and spec.reads_labels and not spec.target_columns and not spec.classes
    return make_examples(table, spec, path, read_labels(sibling, spec) if sibling and reads_both else ())


@dataclass(frozen=True)
class _Plain:
    """Layout of a file without quotes.

    Attributes:
        width: Cells of each line.
    """

    path: Path
    spec: Data
    columns: Columns
    width: int

    @property
    def separator(self) -> str:
        return self.spec.separator or ","

    def chars(self, at: int) -> int:
        """Return the characters that numpy reads of a text column."""
        return TIME_CHARS if at == self.columns.time else SHORT_CHARS


@dataclass
class _Block:
    """Parsed lines: numbers of shape (R, features + targets), texts by column, line numbers."""

    numbers: list[NDArray[np.float32]] = field(default_factory=list)
    texts: list[list[str]] = field(default_factory=list)
    lines: list[NDArray[np.int64]] = field(default_factory=list)


def _read_plain(path: Path, spec: Data, most: int | None) -> TableRows | None:
    """Parse a file by numpy; None where a line is not plain or invalid, and so must be named."""
    line, header = next(read_lines(path, spec))
    plain = _Plain(path, spec, find_columns(header, path, spec), len(header))
    try:
        is_whole = most is None and not (spec.drop_missing or spec.growing or spec.decimal)
        return (_read_at_once(plain, line) if is_whole else None) or _read_blocks(plain, line, most)
    except (ValueError, OSError):
        return None


def _read_at_once(plain: _Plain, header_line: int) -> TableRows | None:
    """Let numpy read a small file; None if it is large, or has blank lines, other line ends, or long names.

    Raises:
        ValueError: As `_parse`.
        OSError: The file cannot be read.
    """
    if plain.path.stat().st_size > WHOLE_BYTES:
        return None
    data = plain.path.read_bytes()
    if any(mark in data for mark in (b'"', b"\0", b"\r")):
        return None
    count = data.count(b"\n") + (data[-1:] != b"\n") - header_line
    del data
    rows, done = _parse(str(plain.path), plain, skiprows=header_line), _Block()
    if len(rows) != count:  # blank lines
        return None
    for at in plain.columns.texts:
        cells = rows[str(at)].tolist()
        if max(map(len, set(cells)), default=0) >= plain.chars(at):
            return None
        done.texts.append(_strip(cells))
    require_room(2 * rows.nbytes, plain.path)
    done.numbers.append(_take_numbers(rows, plain))
    done.lines.append(np.arange(len(rows)) + header_line + 1)
    return _join(done, plain.columns, None)


def _read_blocks(plain: _Plain, header_line: int, most: int | None) -> TableRows:
    """Parse a plain file by numpy.

    Raises:
        ValueError: A line is not plain or invalid, or the file is not UTF-8.
        OSError: The file cannot be read.
    """
    done, columns = _Block(texts=[[] for _ in plain.columns.texts]), plain.columns
    number, count, width = 0, 0, max(1, len(columns.features))
    for text in _split_blocks(plain.path, drops_unfinished=bool(plain.spec.growing)):
        lines = text.split("\n")
        if not lines[-1]:
            lines.pop()
        begin, number = number, number + len(lines)
        if begin < header_line:
            lines = lines[header_line - begin :]
        numbers = np.arange(number - len(lines), number) + 1
        if plain.spec.drop_missing or "" in lines:
            is_row = [bool(line) and not _lacks_number(line, plain) for line in lines]
            lines, numbers = list(compress(lines, is_row)), numbers[np.array(is_row, dtype=np.bool_)]
        if not lines:
            continue
        _parse_block(lines, plain, done)
        done.lines.append(numbers)
        count += len(lines)
        require_room(4 * count * len(columns.numbers) * 2 + TEXT_BYTES * count * len(columns.texts), plain.path)
        if most is not None and count * width >= most:
            break
    return _join(done, columns, None if most is None else -(-most // width))


def _split_blocks(path: Path, *, drops_unfinished: bool) -> Iterator[str]:
    r"""Yield whole lines of a file, each ending with "\n" but perhaps the last one of the file.

    Raises:
        ValueError: A line is too long, quoted or not UTF-8.
    """
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            block += file.readline(MAX_ROW_CHARS)
            if block[-1:] != b"\n" and file.peek(1):
                raise ValueError("lines do not end with a line feed")
            if b"\r" in block:
                block = block.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            if drops_unfinished and block[-1:] != b"\n":
                block = block[: block.rfind(b"\n") + 1]
            if b'"' in block or b"\0" in block:
                raise ValueError("not plain")
            yield block.decode()


def _parse_block(lines: list[str], plain: _Plain, done: _Block) -> None:
    """Parse lines and add them.

    Raises:
        ValueError: A line is invalid, or a cell of text is empty.
    """
    original = lines
    if plain.spec.decimal == ",":
        lines = [line.replace(",", ".") for line in lines]
    rows = _parse(lines, plain)
    if len(rows) != len(lines):
        raise ValueError("a blank line")
    done.numbers.append(_take_numbers(rows, plain))
    for at, column in zip(plain.columns.texts, done.texts, strict=True):
        cells = rows[str(at)].tolist()
        if original is not lines or max(map(len, set(cells))) >= plain.chars(at):  # perhaps cut
            cells = [line.split(plain.separator)[at] for line in original]
        column.extend(_strip(cells))


def _parse(source: str | list[str], plain: _Plain, skiprows: int = 0) -> NDArray[Any]:
    """Parse a file or lines to one record a line; numpy requires as many cells in each as the record has fields.

    Raises:
        ValueError: A line has another number of cells, or a cell is not a number.
    """
    texts = {at: f"U{plain.chars(at)}" for at in plain.columns.texts}
    kinds = texts | dict.fromkeys(plain.columns.numbers, "f4")
    fields = [(str(at), kinds.get(at, "U1")) for at in range(plain.width)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about a file without rows, which is refused later
        return np.loadtxt(
            source, fields, comments=None, delimiter=plain.separator, skiprows=skiprows, ndmin=1, encoding="utf-8-sig"
        )


def _take_numbers(rows: NDArray[Any], plain: _Plain) -> NDArray[np.float32]:
    """Return the numbers of records, of shape (R, features + targets).

    Raises:
        ValueError: One is NaN or infinite.
    """
    numbers = np.empty((len(rows), len(plain.columns.numbers)), dtype=np.float32)
    for place, at in enumerate(plain.columns.numbers):
        numbers[:, place] = rows[str(at)]
    if numbers.size and not is_finite(numbers):
        raise ValueError("not a finite number")
    return numbers


def _strip(cells: list[str]) -> list[str]:
    """Return cells without blanks around them.

    Raises:
        ValueError: One is empty.
    """
    distinct = set(cells)
    if any(cell != cell.strip() for cell in distinct):
        cells = [cell.strip() for cell in cells]
        distinct = set(cells)
    if "" in distinct:
        raise ValueError("an empty cell")
    return cells


def _lacks_number(line: str, plain: _Plain) -> bool:
    """Check whether a cell of a feature or target stands for a missing number."""
    missing, separator = plain.spec.drop_missing or (), plain.separator
    if not any(cell in line for cell in missing if cell) and "" not in missing:
        return False
    cells = line.split(separator)
    if len(cells) != plain.width:
        raise ValueError("rows differ in their number of cells")
    return any(cells[at].strip() in missing for at in plain.columns.numbers)


def _join(block: _Block, columns: Columns, most: int | None) -> TableRows:
    shape = (0, len(columns.numbers))
    numbers = np.concatenate([np.empty(shape, dtype=np.float32), *block.numbers])[:most]
    texts: dict[int | None, list[str]] = dict(
        zip(columns.texts, (column[:most] for column in block.texts), strict=True)
    )
    labels, clients, times = (texts.get(at, []) for at in (columns.label, columns.client, columns.time))
    return TableRows(
        np.ascontiguousarray(numbers[:, : len(columns.features)]),
        np.ascontiguousarray(numbers[:, len(columns.features) :]),
        labels,
        clients,
        times,
        np.concatenate([np.empty(0, dtype=np.int64), *block.lines])[:most],
    )


def _read_rows(path: Path, spec: Data, most: int | None) -> TableRows:
    """Read a file line by line.

    Raises:
        ConfigError: A line or cell is not as expected; the message names both.
    """
    lines, missing, checked = read_lines(path, spec), spec.drop_missing or (), 0
    _, header = next(lines)
    columns = find_columns(header, path, spec)
    numbers, texts, places = array("f"), [list[str]() for _ in columns.texts], array("q")
    for line, cells in lines:
        if most is not None and len(places) * len(columns.features) >= most:
            break
        if len(numbers) >= checked:
            require_room(2 * numbers.itemsize * len(numbers), path)  # as long again for the inputs made of them
            checked = len(numbers) + CHECKED_EVERY
        if missing and any(cells[at] in missing for at in columns.numbers):
            continue
        numbers.extend([_parse_number(cells[at], path, line, header[at], spec) for at in columns.numbers])
        places.append(line)
        for at, column in zip(columns.texts, texts, strict=True):
            column.append(require_text(cells[at], path, line, header[at]))
    values = np.frombuffer(numbers, dtype=np.float32).reshape(-1, len(columns.numbers))
    return _join(_Block([values], texts, [np.frombuffer(places, dtype=np.int64)]), columns, None)


def _parse_number(cell: str, path: Path, line: int, column: str, spec: Data) -> float:
    text = cell.replace(",", ".") if spec.decimal == "," else cell
    try:
        value = float(text) if _NUMBER.fullmatch(text) else math.nan
    except ValueError:
        value = math.nan
    if abs(value) <= FLOAT32_MAX:  # false for NaN
        return value
    what = "target column" if column in (spec.target_columns or ()) else "column"
    remedy = "correct it, or leave the column out by skip_columns"
    if what == "target column":
        remedy = "correct it or target_columns; a class goes to label_column"
    if not cell:
        raise ConfigError(
            f'{path}: line {line}, {what} {column!r}: empty; fill it in, remove the line, or set drop_missing = [""]'
        )
    if "," in cell and _NUMBER.fullmatch(cell.replace(",", ".", 1)):
        remedy = 'write decimals with a point, or set decimal = ","'
    raise ConfigError(f"{path}: line {line}, {what} {column!r}: {cell!r} is not a finite number; {remedy}")
