"""Read and write a trace's files; every error names the file and line."""

from __future__ import annotations

import csv
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import msgspec
from msgspec import Struct

from edge_server.record.rows import TABLES, columns
from edge_server.replay.trace import header as headers
from edge_server.replay.trace.cells import format_row, parse_row
from edge_server.replay.trace.header import TraceHeader
from edge_server.replay.trace.trace import Trace, check_trace
from shared.errors import ConfigError
from shared.runtime.durable import explain_disk_errors

MAX_FILE_BYTES = 1 << 30
MAX_ROWS = 1_000_000
MAX_LINE = 1 << 20


def write(trace: Trace, folder: Path) -> None:
    """Write a trace into a new or empty folder; the header comes last and marks it complete.

    Raises:
        ConfigError: The folder is not empty.
        Unwritable: The disk is full.
    """
    with explain_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder}: not empty; name a new folder")
        for table in TABLES:
            with (folder / f"{table}.csv").open("w", encoding="utf-8", newline="") as file:
                lines = csv.writer(file, lineterminator="\n")
                lines.writerow(columns(table))
                lines.writerows(format_row(table, table_row) for table_row in trace.tables[table])
        (folder / headers.FILE).write_bytes(headers.encode(msgspec.structs.replace(trace.header, marked=True)))


def is_trace(path: Path) -> bool:
    """Check for a trace's header in a folder."""
    return (path / headers.FILE).exists()


def read(folder: Path) -> Trace:
    """Read and check a trace.

    Raises:
        ConfigError: A file is missing, too large, truncated or not of the schema, or rows contradict each other.
    """
    path = folder / headers.FILE
    try:
        with _open_bounded(path, headers.MAX_BYTES) as file:
            data = file.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error}); restore the file from a copy") from error
    header = headers.decode(data.encode(), path)
    tables = {table: tuple(_rows(folder, header, table)) for table in TABLES}
    header = msgspec.structs.replace(header, marked=False)  # marks were removed while reading
    return check_trace(Trace(header, tables), folder)


def _open_bounded(path: Path, most_bytes: int) -> TextIO:
    """Open a regular file of bounded size."""

    def open_nonblocking(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)  # opening a pipe without writer would block

    try:
        file = open(path, encoding="utf-8", newline="", opener=open_nonblocking)  # noqa: SIM115 - returned open
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; a trace is a folder with {headers.FILE} and its tables"
        ) from error
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode) or status.st_size > most_bytes:
        file.close()
        raise ConfigError(f"{path}: not a regular file of at most {most_bytes} bytes")
    return file


def _rows(folder: Path, header: TraceHeader, table: str) -> Iterator[Struct]:
    path, expected = folder / f"{table}.csv", header.tables[table].rows
    count = 0
    with _open_bounded(path, MAX_FILE_BYTES) as file, _long_fields():
        reader = csv.reader(_lines(file), strict=True)
        try:
            names = _check_columns(next(reader, []), table, header)
            for texts in reader:
                count += 1
                if len(texts) != len(names) or count > MAX_ROWS:
                    raise ConfigError(f"{len(texts)} cells under {len(names)} columns, or more than {MAX_ROWS} rows")  # noqa: TRY301
                yield parse_row(table, dict(zip(names, texts, strict=True)), marked=header.marked)
        except (ConfigError, csv.Error, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}:{reader.line_num}: {error}; correct or restore that line") from error
    if count != expected:
        raise ConfigError(f"{path}: {count} rows, but the header says {expected}; restore the file from a copy")


@contextmanager
def _long_fields() -> Iterator[None]:
    """Raise the limit on field length inside the block; the limit is global to the process."""
    before = csv.field_size_limit(MAX_LINE)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _lines(file: TextIO) -> Iterator[str]:
    """Yield a file's lines of bounded length."""
    while line := file.readline(MAX_LINE):
        if not line.endswith("\n"):
            raise ConfigError("the line is truncated" if len(line) < MAX_LINE else "the line is too long")
        yield line


def _check_columns(names: list[str], table: str, header: TraceHeader) -> list[str]:
    missing = [column for column in columns(table) if column in header.tables[table].columns and column not in names]
    if missing:
        raise ConfigError(f"the column {missing[0]!r} is missing (of {len(missing)} in all)")
    if len(set(names)) != len(names):
        raise ConfigError("two columns have the same name")
    return names
