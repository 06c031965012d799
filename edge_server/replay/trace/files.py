"""A trace's files: written row by row, read with bounds, every mistake named by file and line.

A row as the text of its cells, and back: what is read is exactly what was written.
"""

from __future__ import annotations

import csv
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TextIO, TypeVar

import msgspec

from edge_server.replay.trace import header as headers
from edge_server.replay.trace.header import Table, Trial
from edge_server.replay.trace.schema import PROVENANCE, TABLES, TOLD, TableRow, columns, unit_of
from edge_server.replay.trace.trace import Trace, check_trace
from shared.errors import ConfigError
from shared.protocol.measurements import Provenance
from shared.runtime.durable import explain_disk_errors

T = TypeVar("T")

MAX_S = 1e10
"""Three hundred years; no run is longer, and beyond it a clock of doubles loses its microseconds."""

FORMULA = ("=", "+", "-", "@", "'")
"""What a spreadsheet computes at the head of a text, and the mark that we put before such a text."""

TREES = ("metrics", "refused", "values")
"""Columns whose cells are JSON objects."""

_encoder = msgspec.json.Encoder(order="deterministic")

MAX_FILE_BYTES = 1 << 30
MAX_ROWS = 1_000_000
MAX_LINE = 1 << 20


def cells(table: str, row: TableRow) -> list[str]:
    """Return a row's cells in the order of `columns`."""
    known: dict[str, Any] = {name: getattr(row, name) for name in row.__struct_fields__}
    for figure, one in known.pop("provenance", {}).items():
        known |= {f"{figure}_{part}": getattr(one, part) for part in PROVENANCE}
    return [_text(known.get(column)) for column in columns(table)]


def _text(value: object) -> str:
    if isinstance(value, dict):
        return _encoder.encode(value).decode() if value else ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        line = "".join(one if one.isprintable() else " " for one in value)  # a row is a line
        return f"'{line}" if line.startswith(FORMULA) else line
    return "" if value is None else repr(value)


def row(table: str, found: Mapping[str, str], *, marked: bool = True) -> TableRow:
    """Return the row of some cells by column; columns that are not ours are left out.

    Args:
        marked: Whether texts that a spreadsheet would compute have a mark before them, which is taken away.

    Raises:
        ConfigError: A cell does not hold what its column must; the message names the column.
    """
    known = {column: found[column].removeprefix("'" * marked) for column in columns(table) if found.get(column)}
    fields: dict[str, Any] = {name: cell for name, cell in known.items() if name in TABLES[table].__struct_fields__}
    for name in TREES:
        if name in fields:
            fields[name] = _tried(partial(msgspec.json.decode, fields[name]), f"{name}`")
    provenance = {figure: _provenance(figure, known) for figure in TOLD.get(table, ())}
    if any(provenance.values()):
        fields["provenance"] = {figure: one for figure, one in provenance.items() if one}
    read = _tried(lambda: msgspec.convert(fields, TABLES[table], strict=False), "")
    for name in read.__struct_fields__:
        _require_true(name, getattr(read, name))
        _require_storable(name, getattr(read, name))
    return read


def _require_storable(name: str, value: object) -> None:
    """Refuse an integer that no record could hold, wherever it stands in a cell."""
    try:
        msgspec.msgpack.encode(value)
    except OverflowError as error:
        raise ConfigError(f"column `{name}`: an integer of more than 64 bits") from error


def _tried(read: Callable[[], T], column: str) -> T:
    """Return what is read, with the name of its column in the error."""
    try:
        return read()
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        cause, _, place = str(error).rstrip("`").partition(" - at `$")
        raise ConfigError(f"column `{column or place.removeprefix('.') + '`'}: {cause}") from error


def _provenance(figure: str, known: Mapping[str, str]) -> Provenance | None:
    parts = {part: known[f"{figure}_{part}"] for part in PROVENANCE if f"{figure}_{part}" in known}
    if not parts:
        return None
    return _tried(
        lambda: msgspec.convert({"source": ""} | parts, Provenance, strict=False),
        f"{figure}_quality` or its neighbours",
    )


def _require_true(name: str, value: object) -> None:
    figures: list[object] = [value]
    if isinstance(value, dict):
        figures = [*value.values(), *(getattr(one, "uncertainty", None) for one in value.values())]
    for one in figures:
        if isinstance(one, float) and not math.isfinite(one):
            raise ConfigError(f"column `{name}`: {one} cannot be true")
        if isinstance(one, float) and unit_of(name) == "s" and one > MAX_S:
            raise ConfigError(f"column `{name}`: {one:g} s cannot be true")


def write(trace: Trace, folder: Path) -> None:
    """Write a trace into a new or empty folder, the header last: without it there is no trace.

    Raises:
        ConfigError: There is something in the folder.
        Unwritable: The disk takes nothing more.
    """
    with explain_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder}: not empty; name a new folder")
        for table in TABLES:
            with (folder / f"{table}.csv").open("w", encoding="utf-8", newline="") as file:
                lines = csv.writer(file, lineterminator="\n")
                lines.writerow(columns(table))
                lines.writerows(cells(table, one) for one in trace.tables[table])
        (folder / headers.FILE).write_bytes(headers.encode(msgspec.structs.replace(trace.header, marked=True)))


def described(tables: Mapping[str, tuple[TableRow, ...]]) -> dict[str, Table]:
    """Return what the header says of tables."""
    return {
        table: Table(rows=len(tables[table]), columns={column: unit_of(column) for column in columns(table)})
        for table in TABLES
    }


def is_trace(path: Path) -> bool:
    """Tell whether a path is a trace's folder."""
    return (path / headers.FILE).exists()


def read(folder: Path) -> Trace:
    """Read a trace.

    Raises:
        ConfigError: A file is missing, too large, cut short or not of the schema, or the rows contradict one another.
    """
    path = folder / headers.FILE
    try:
        with _opened(path, headers.MAX_BYTES) as file:
            data = file.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: no UTF-8 text ({error}); restore the file from a copy") from error
    header = headers.decode(data.encode(), path)
    tables = {table: tuple(_rows(folder, header, table)) for table in TABLES}
    header = msgspec.structs.replace(header, marked=False)  # the texts read have no marks any more
    return check_trace(Trace(header, tables), folder)


def _opened(path: Path, most_bytes: int) -> TextIO:
    """Open a plain file of bounded size."""
    try:
        file = open(path, encoding="utf-8", newline="", opener=_unblocking)  # noqa: SIM115 - returned open
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; a trace is a folder with {headers.FILE} and its tables"
        ) from error
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode) or found.st_size > most_bytes:
        file.close()
        raise ConfigError(f"{path}: no plain file of at most {most_bytes} bytes; a longer one is not read")
    return file


def _unblocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe nobody writes to would be waited for


def _rows(folder: Path, header: Trial, table: str) -> Iterator[TableRow]:
    path, expected = folder / f"{table}.csv", header.tables[table].rows
    count = 0
    with _opened(path, MAX_FILE_BYTES) as file, _long_fields():
        reader = csv.reader(_lines(file), strict=True)
        try:
            names = _names(next(reader, []), table)
            for found in reader:
                count += 1
                if len(found) != len(names) or count > MAX_ROWS:
                    raise ConfigError(f"{len(found)} cells under {len(names)} columns, or more than {MAX_ROWS} rows")  # noqa: TRY301
                yield row(table, dict(zip(names, found, strict=True)), marked=header.marked)
        except (ConfigError, csv.Error, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}:{reader.line_num}: {error}; correct or restore that line") from error
    if count != expected:
        raise ConfigError(f"{path}: {count} rows, the header says {expected}: rows are missing or were added")


@contextmanager
def _long_fields() -> Iterator[None]:
    """Let a field be as long as a line inside the block; the limit is the whole process's, and other readers' too."""
    before = csv.field_size_limit(MAX_LINE)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _lines(file: TextIO) -> Iterator[str]:
    """Yield a file's lines, none longer than any of ours."""
    while line := file.readline(MAX_LINE):
        if not line.endswith("\n"):
            raise ConfigError("the line does not end here" if len(line) < MAX_LINE else "the line is too long")
        yield line


def _names(names: list[str], table: str) -> list[str]:
    missing = [column for column in columns(table) if column not in names]
    if missing:
        raise ConfigError(f"the column {missing[0]!r} is missing (of {len(missing)} in all)")
    if len(set(names)) != len(names):
        raise ConfigError("two columns have one name")
    return names
