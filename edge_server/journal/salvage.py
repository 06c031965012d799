"""What a damaged journal still holds: the records before the damage, which are a run as it stood earlier."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

from edge_server.journal.records import AnyRecord
from edge_server.journal.rows import INSERT, SCHEMA, SELECT, Row, encode, good, mark
from shared.runtime.durable import aside, drop_oldest, explained, sync

log = logging.getLogger(__name__)


def salvageable(journal: Path) -> list[AnyRecord]:
    """Return the records of a journal up to the damage."""
    return good(_rows(journal))


def salvage(journal: Path, cause: Exception) -> None:
    """Put a journal of what is whole in the place of a damaged one, which is set aside.

    At any moment one of both is there under the journal's name. What the old one had not yet taken over from its
    write-ahead log is set aside with it: the new one must not take it over.

    Raises:
        Unwritable: The disk takes nothing more.
    """
    records = salvageable(journal)
    with explained(journal):
        partial = journal.with_name(f"{journal.name}.part")
        partial.unlink(missing_ok=True)
        _write(partial, records)
        unused = aside(journal)
        os.link(journal, unused)
        with suppress(FileNotFoundError):
            journal.with_name(f"{journal.name}-wal").replace(f"{unused}-wal")
        journal.with_name(f"{journal.name}-shm").unlink(missing_ok=True)
        partial.replace(journal)
        sync(journal.parent)
        drop_oldest(journal.parent.glob("*.corrupt-*[0-9]"))
        drop_oldest(journal.parent.glob("*.corrupt-*-wal"))
    log.error("%s: set aside as %s, going on from its %d records that are whole", cause, unused.name, len(records))


def _rows(journal: Path) -> Iterator[Row]:
    with (
        suppress(sqlite3.Error, UnicodeDecodeError),
        closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as connection,
    ):
        yield from connection.execute(SELECT, (0,))


def _write(path: Path, records: list[AnyRecord]) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(SCHEMA)
        before = 0
        for record in records:
            body = encode(record)
            before = mark(body, before)
            connection.execute(INSERT, (body, before))
