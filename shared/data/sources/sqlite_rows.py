"""Bounded reader of an SQLite table, without numpy."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from shared.data.name_text import normalise_name
from shared.data.sources.columns import find_columns
from shared.data.spec import Data
from shared.errors import ConfigError, describe_cause

REMEDIES = {
    "locked": "another program writes to it: let it use PRAGMA journal_mode = WAL, or read a copy",
    "malformed": "restore a copy, or save what is left by sqlite3 FILE .recover",
}
"""Remedy by a phrase of the cause."""
BATCH_ROWS = 1 << 14
MAX_LISTED = 12


@contextmanager
def open_database(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a file for reading; faults inside the block are named.

    Raises:
        ConfigError: It is missing, damaged, locked, or lacks a table or column.
    """
    try:
        if not path.is_file():
            raise ConfigError(f"{path}: no such file; correct path")
        uri = f"{path.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True)) as database:
            yield database
    except sqlite3.Error as error:
        cause = describe_cause(error)
        remedy = next(
            (remedy for phrase, remedy in REMEDIES.items() if phrase in cause), "correct path, table or the file"
        )
        raise ConfigError(f"{path}: cannot be read as SQLite ({cause}); {remedy}") from error


def find_table(database: sqlite3.Connection, path: Path, spec: Data) -> str:
    """Return the name of the table to read.

    Raises:
        ConfigError: There is none of the name in `spec.table`, or several where it is not set.
    """
    query = "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite_%' ORDER BY name"
    names = [str(name) for (name,) in database.execute(query)]
    if spec.table:
        if spec.table not in names:
            raise ConfigError(f"{path}: has no table {spec.table!r}, only {_format(names)}; correct data.table")
        return spec.table
    if not names:
        raise ConfigError(f"{path}: has no table; correct path")
    if len(names) != 1:
        raise ConfigError(f"{path}: has {len(names)} tables: {_format(names)}; name one by data.table")
    return names[0]


def read_header(database: sqlite3.Connection, table: str) -> list[str]:
    """Return the names of a table's columns."""
    return [name for name, *_ in database.execute(f"SELECT * FROM {quote(table)} LIMIT 0").description]  # noqa: S608 - quoted


def read_rows(
    database: sqlite3.Connection, table: str, names: Sequence[str], order_by: str
) -> Iterator[list[tuple[Any, ...]]]:
    """Yield batches of rows with these columns, in the order of a column; of the file where it is empty."""
    order = f" ORDER BY {quote(order_by)}" if order_by else ""
    cursor = database.execute(f"SELECT {', '.join(map(quote, names))} FROM {quote(table)}{order}")  # noqa: S608 - quoted
    while rows := cursor.fetchmany(BATCH_ROWS):
        yield rows


def read_label_names(path: Path, spec: Data, most: int) -> set[str]:
    """Return the distinct labels of a file, normalised; at most one more than `most`.

    Raises:
        ConfigError: As `open_database` and `find_columns`.
    """
    with open_database(path) as database:
        table = find_table(database, path, spec)
        find_columns(read_header(database, table), path, spec)
        label = quote(spec.label_column)
        query = f"SELECT DISTINCT {label} FROM {quote(table)} WHERE {label} IS NOT NULL LIMIT {most + 1}"  # noqa: S608 - quoted
        return {normalise_name(label_text(cell)) for (cell,) in database.execute(query)}


def label_text(cell: object) -> str:
    """Return a class as text: 1.0 as "1", since a column of reals may hold whole numbers."""
    return str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell)


def quote(name: str) -> str:
    """Quote a name for SQL."""
    return '"' + name.replace('"', '""') + '"'


def _format(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more or "none"
