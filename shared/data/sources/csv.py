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
from array import array
from collections.abc import Iterator, Sequence
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
BLOCK_BYTES = 1 << 18
"""Size of a block that numpy parses at once; its lines stay in a processor's cache."""
_VISIBLE = np.uint8(ord("!")), np.uint8(ord("~"))
"""First and last ASCII character that is not blank."""
_EXCHANGED = str.maketrans(",.", ".,")
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

    @property
    def missing(self) -> set[str]:
        return set(map(self.write_points, self.spec.drop_missing or ()))

    def write_points(self, text: str) -> str:
        """Exchange decimal commas and points, which numpy reads; a number with a point is then invalid."""
        if self.spec.decimal != ",":
            return text
        return text.translate(_EXCHANGED) if "." in text else text.replace(",", ".")

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
        return _read_blocks(plain, line, most)
    except (ValueError, OSError):
        return None


def _read_blocks(plain: _Plain, header_line: int, most: int | None) -> TableRows:
    """Parse a plain file by numpy.

    Raises:
        ValueError: A line is not plain or invalid, or the file is not UTF-8.
        OSError: The file cannot be read.
    """
    columns = plain.columns
    done, number, count, checked = _Block(texts=[[] for _ in columns.texts]), 0, 0, 0
    width = max(1, len(columns.features))
    for block in _split_blocks(plain.path, drops_unfinished=bool(plain.spec.growing)):
        text = plain.write_points(block)
        lines = text.split("\n")
        if not lines[-1]:
            lines.pop()
        begin, number = number, number + len(lines)
        is_row = np.ones(len(lines), dtype=np.bool_)
        is_row[: max(0, header_line - begin)] = False
        if plain.spec.drop_missing and lines:
            is_row[_find_incomplete(text, lines, plain)] = False
        if not is_row.all():
            lines = list(compress(lines, is_row.tolist()))
        if not any(lines):
            continue
        done.lines.append(np.flatnonzero(is_row) + begin + 1)
        _parse_block(lines, plain, done)
        count += len(done.lines[-1])
        if count * width >= checked:
            require_room(4 * count * len(columns.numbers) * 2 + TEXT_BYTES * count * len(columns.texts), plain.path)
            checked = count * width + CHECKED_EVERY
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


def _find_incomplete(text: str, lines: Sequence[str], plain: _Plain) -> list[int]:
    """Find the lines that lack a number, by `drop_missing`; only lines in which a search finds the cell are split.

    Raises:
        ValueError: A line has another number of cells, or the separator is not ASCII.
    """
    codes, missing = np.frombuffer(f"\n{text}\n".encode(), dtype=np.uint8), plain.missing
    (separator_code,) = plain.separator.encode("ascii")
    is_edge = (codes - _VISIBLE[0] > _VISIBLE[1] - _VISIBLE[0]) | (codes == separator_code)
    is_candidate = np.zeros(len(codes), dtype=np.bool_)
    for pattern in map(str.encode, missing):
        count = max(0, len(codes) - len(pattern) - 1)
        is_match = is_edge[:count] & is_edge[len(codes) - count :]
        for place, code in enumerate(pattern, 1):
            is_match &= codes[place : place + count] == code
        is_candidate[:count] |= is_match
    ends = np.flatnonzero(codes == ord("\n"))
    candidates = np.unique(np.searchsorted(ends, np.flatnonzero(is_candidate), side="right") - 1).tolist()
    separator, numbers = plain.separator, plain.columns.numbers
    incomplete = list[int]()
    for at in candidates:
        if at < len(lines) and lines[at]:
            cells = lines[at].split(separator)
            if len(cells) != plain.width:
                raise ValueError("rows differ in their number of cells")
            if any(cells[place].strip() in missing for place in numbers):
                incomplete.append(at)
    return incomplete


def _parse_block(lines: list[str], plain: _Plain, done: _Block) -> None:
    """Parse lines and add them; their numbers were added before.

    Raises:
        ValueError: A line is invalid, or a cell of text is empty.
    """
    rows = _parse(lines, plain)
    if len(rows) < len(lines):  # numpy leaves out blank ones
        done.lines[-1] = done.lines[-1][[bool(line) for line in lines]]
        lines = list(filter(None, lines))
    if len(rows) != len(lines):
        raise ValueError("numpy left out a line")
    done.numbers.append(_take_numbers(rows, plain))
    for at, column in zip(plain.columns.texts, done.texts, strict=True):
        cells = rows[str(at)].tolist()
        if max(map(len, set(cells))) >= plain.chars(at):  # perhaps cut
            cells = [line.split(plain.separator)[at] for line in lines]
        column.extend(_strip(cells, plain))


def _parse(lines: list[str], plain: _Plain) -> NDArray[Any]:
    """Parse lines to one record a line; numpy requires as many cells in each as the record has fields.

    Raises:
        ValueError: A line has another number of cells, or a cell is not a number.
    """
    texts = {at: f"U{plain.chars(at)}" for at in plain.columns.texts}
    kinds = texts | dict.fromkeys(plain.columns.numbers, "f4")
    fields = [(str(at), kinds.get(at, "U1")) for at in range(plain.width)]
    return np.loadtxt(lines, fields, comments=None, delimiter=plain.separator, ndmin=1)


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


def _strip(cells: list[str], plain: _Plain) -> list[str]:
    """Return cells without blanks around them, and with commas and points as in the file.

    Raises:
        ValueError: One is empty.
    """
    names = {cell: plain.write_points(cell.strip()) for cell in set(cells)}
    if "" in names.values():
        raise ValueError("an empty cell")
    return cells if all(cell == name for cell, name in names.items()) else [names[cell] for cell in cells]


def _join(block: _Block, columns: Columns, most: int | None) -> TableRows:
    width, parts = len(columns.features), [np.empty((0, len(columns.numbers)), dtype=np.float32), *block.numbers]
    texts: dict[int | None, list[str]] = dict(
        zip(columns.texts, (column[:most] for column in block.texts), strict=True)
    )
    labels, clients, times = (texts.get(at, []) for at in (columns.label, columns.client, columns.time))
    return TableRows(
        np.concatenate([part[:, :width] for part in parts])[:most],
        np.concatenate([part[:, width:] for part in parts])[:most],
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
    text = cell
    if spec.decimal == ",":
        text = "" if "." in cell else cell.replace(",", ".")
    try:
        value = float(text) if _NUMBER.fullmatch(text) else math.nan
    except ValueError:
        value = math.nan
    if abs(value) <= FLOAT32_MAX:  # false for NaN
        return value
    is_target = column in (spec.target_columns or ())
    what, others = ("target column", "target_columns") if is_target else ("column", "skip_columns")
    if not cell:
        raise ConfigError(
            f'{path}: line {line}, {what} {column!r}: empty; fill it in, remove the line, or set drop_missing = [""]'
        )
    remedy = f"correct it or {others}, or list it in drop_missing where it stands for a missing number"
    if is_target:
        remedy += "; a class goes to label_column"
    if spec.decimal == "," and "." in cell:
        remedy = 'decimal is ",": write it without points, or remove decimal'
    elif "," in cell and _NUMBER.fullmatch(cell.replace(",", ".", 1)):
        remedy = 'write decimals with a point, or set decimal = ","'
    raise ConfigError(f"{path}: line {line}, {what} {column!r}: {cell!r:.60} is not a finite number; {remedy}")
