"""CSV tables with a header row, one example or time step per line.

The path is one file, or a folder with `train.csv` and `test.csv`. Classes that are integers from 0 keep their numbers,
so that devices which lack a class still agree. Other classes are numbered in the order of their names, those of both
files where there are two, unless `classes` names them all. A label with a leading zero is a name: "01" is not 1.

Plain files are parsed by numpy. A file with quotes or a fault is read again line by line, which names the
fault.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.data.sources.arrays import FLOAT_BYTES, ReadPart, is_finite
from shared.data.sources.columns import Columns, find_columns
from shared.data.sources.csv_lines import MAX_ROW_CHARS, read_labels, read_lines, require_text, split_paths
from shared.data.sources.table import TableRows, make_examples
from shared.data.spec import Data
from shared.errors import ConfigError
from shared.runtime.memory import available_bytes, require_room

FLOAT32_MAX = float(np.finfo(np.float32).max)
_NUMBER = re.compile(r"[+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?")
"""Python's float would accept more: "1_5" as 15, digits of other scripts."""
CHECKED_EVERY, UNCHECKED_BYTES = 1 << 18, 1 << 22
"""Numbers between two checks of the available memory, and bytes."""
BLOCK_BYTES = 1 << 18
"""Size of a block that is split into lines at once; they stay in a processor's cache."""
_VISIBLE = np.uint8(ord("!")), np.uint8(ord("~"))
"""First and last ASCII character that is not blank."""
_EXCHANGED = str.maketrans(",.", ".,")
TEXT_CHARS = (12, 33, 96)
"""Characters of a text, and one, that numpy reads at first, from the second on where there are times, and then."""


def read_part(spec: Data, most: int | None = None) -> ReadPart:
    """Read inputs of shape (N, features) or windows, labels, and the clients if a column names them.

    Args:
        most: Features in all of the first lines to read; None for no limit.

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
        header: Number of the header's line.
        width: Cells of each line.
        places: Number of each line that was read; filled while lines are.
    """

    path: Path
    spec: Data
    columns: Columns
    header: int
    width: int
    places: list[NDArray[np.int64]] = field(default_factory=list)

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

    def record(self, chars: int) -> np.dtype[Any]:
        """Return the type of a parsed line; texts have up to `chars` characters."""
        kinds = dict.fromkeys(self.columns.texts, f"U{chars}") | dict.fromkeys(self.columns.numbers, "f4")
        return np.dtype([(str(at), kinds.get(at, "U1")) for at in range(self.width)])


def _read_plain(path: Path, spec: Data, most: int | None) -> TableRows | None:
    """Parse a file by numpy; None where a line is not plain or invalid, and so must be named."""
    line, header = next(read_lines(path, spec))
    plain = _Plain(path, spec, find_columns(header, path, spec), line, len(header))
    try:
        return _parse(plain, None if most is None else -(-most // max(1, len(plain.columns.features))))
    except (ValueError, OSError):
        return None


def _parse(plain: _Plain, most_rows: int | None) -> TableRows:
    """Parse a plain file by numpy, again with more characters where a text may have been cut.

    Raises:
        ValueError: A line is not plain or invalid, or the file is not UTF-8.
        OSError: The file cannot be read.
    """
    columns = plain.columns
    for chars in TEXT_CHARS[columns.time is not None :]:
        rows, places = _load_rows(plain, plain.record(chars), most_rows)
        texts = [rows[str(at)].tolist() for at in columns.texts]
        distinct = [set(cells) for cells in texts]
        if all(len(cell) < chars for cells in distinct for cell in cells):
            break
    else:
        raise ValueError("too long a text")
    numbers = np.empty((len(rows), len(columns.numbers)), dtype=np.float32)
    for place, at in enumerate(columns.numbers):
        numbers[:, place] = rows[str(at)]
    if numbers.size and not is_finite(numbers):
        raise ValueError("not a finite number")
    stripped = [_strip(cells, kinds, plain) for cells, kinds in zip(texts, distinct, strict=True)]
    return _make_rows(numbers, stripped, places, columns)


def _load_rows(plain: _Plain, record: np.dtype[Any], most_rows: int | None) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return parsed lines and their numbers; numpy requires as many cells in each as the record has fields."""
    keys: dict[str, Any] = {"comments": None, "delimiter": plain.separator, "ndmin": 1, "max_rows": most_rows}
    row_bytes = record.itemsize + FLOAT_BYTES * len(plain.columns.numbers)
    size = plain.path.stat().st_size
    if _is_readable(plain, size // (2 * plain.width) * row_bytes):
        rows = np.loadtxt(plain.path, record, skiprows=plain.header, encoding="utf-8", **keys)
        if not plain.spec.growing or plain.path.stat().st_size == size:  # else its last line may be unfinished
            return rows, np.arange(plain.header + 1, plain.header + 1 + len(rows))
    plain.places.clear()
    lines = chain.from_iterable(_read_blocks(plain, row_bytes))
    first = next(lines, "")
    rows = np.loadtxt(chain([first], lines), record, **keys) if first else np.empty(0, record)
    places = np.concatenate([np.empty(0, dtype=np.int64), *plain.places])[:most_rows]
    if len(rows) != len(places):
        raise ValueError("numpy left out a line")
    return rows, places


def _is_readable(plain: _Plain, most_bytes: int) -> bool:
    """Return true if numpy can read the file itself, and its rows fit in memory: `most_bytes` if all cells are short.

    Where rows have times, messages name lines, which numpy does not count.

    Raises:
        OSError: The file cannot be read.
    """
    spec = plain.spec
    if spec.drop_missing or spec.decimal == "," or spec.time_column:
        return False
    if most_bytes > UNCHECKED_BYTES and most_bytes > available_bytes():
        return False
    with plain.path.open("rb") as file:
        block = file.read(BLOCK_BYTES)
        if not b"".join(block.split(b"\n", plain.header)[plain.header :]).strip():
            return False  # no line in the first block
        ends = True
        while block and not any(code in block for code in (b'"', b"\0")):
            ends, block = block.endswith(b"\n"), file.read(BLOCK_BYTES)
    return not block and (ends or not spec.growing)


def _read_blocks(plain: _Plain, row_bytes: int) -> Iterator[list[str]]:
    """Yield the lines of a plain file below its header, without blank ones and those that lack a number.

    Raises:
        ValueError: As `_split_blocks` and `_find_incomplete`.
    """
    count, number, checked = 0, 0, UNCHECKED_BYTES
    for block in _split_blocks(plain.path, drops_unfinished=bool(plain.spec.growing)):
        text = plain.write_points(block)
        lines = text.split("\n")
        if not lines[-1]:
            lines.pop()
        begin, number = number, number + len(lines)
        places = np.arange(begin + 1, number + 1)
        dropped = _find_incomplete(text, lines, plain) if plain.spec.drop_missing else []
        if "" in lines:
            dropped += [at for at, line in enumerate(lines) if not line]
        if plain.header > begin:
            dropped += range(min(plain.header - begin, len(lines)))
        if dropped:
            is_row = np.ones(len(lines), dtype=np.bool_)
            is_row[dropped] = False
            places, lines = places[is_row], list(compress(lines, is_row.tolist()))
        count += len(lines)
        if (needed := row_bytes * count) >= checked:
            require_room(needed, plain.path)
            checked = needed + UNCHECKED_BYTES
        plain.places.append(places)
        yield lines


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


def _strip(cells: list[str], distinct: Collection[str], plain: _Plain) -> list[str]:
    """Return cells without blanks around them, and with commas and points as in the file.

    Raises:
        ValueError: One is empty.
    """
    names = {cell: plain.write_points(cell.strip()) for cell in distinct}
    if "" in names.values():
        raise ValueError("an empty cell")
    return cells if all(cell == name for cell, name in names.items()) else [names[cell] for cell in cells]


def _make_rows(
    numbers: NDArray[np.float32], texts: Sequence[list[str]], places: NDArray[np.int64], columns: Columns
) -> TableRows:
    width, by_column = len(columns.features), dict(zip(columns.texts, texts, strict=True))
    labels, clients, times = (
        [] if at is None else by_column[at] for at in (columns.label, columns.client, columns.time)
    )
    features = numbers[:, :width] if columns.targets else numbers
    return TableRows(np.ascontiguousarray(features), numbers[:, width:].copy(), labels, clients, times, places)


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
    return _make_rows(values, texts, np.frombuffer(places, dtype=np.int64), columns)


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
