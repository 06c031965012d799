"""The store on disk: a SQLite journal in WAL mode, checkpoints and accepted updates beside it, in one folder a run."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from edge_server.journal import checkpoints, rows
from edge_server.journal.disk import sql_explained, to_read
from edge_server.journal.persist import RETRY_S
from edge_server.journal.records import AnyRecord
from edge_server.journal.salvage import salvage
from shared.errors import CorruptFile
from shared.runtime.durable import explained
from shared.tensors.tree import State

JOURNAL = "journal.sqlite"
ATTEMPTS = 50


class SqliteStore:
    """One run's folder. May be used from several threads, one call at a time."""

    def __init__(self, folder: Path, *, durable: bool = True, updates: Path | None = None) -> None:
        """Open or create a run's folder; a damaged journal is set aside, and what of it is whole is gone on with.

        Args:
            folder: The run's folder.
            durable: Whether to wait for the disk: until a record is on it, and where it is full, for room.
            updates: Where accepted updates lie, if not in the run's folder.

        Raises:
            Unwritable: The disk takes nothing more.
        """
        with explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.updates, self.retry_s = folder, updates or folder / "updates", RETRY_S if durable else None
        self._lock, self._durable = threading.Lock(), durable
        try:
            self._open()
        except CorruptFile as error:
            salvage(folder / JOURNAL, error)
            self._open()

    def _open(self) -> None:
        path = self.folder / JOURNAL
        with sql_explained(path):
            self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        try:
            with sql_explained(path):
                self._connection.execute("PRAGMA journal_mode = WAL")
                self._connection.execute(f"PRAGMA synchronous = {'FULL' if self._durable else 'OFF'}")
                self._connection.execute(rows.SCHEMA)
                _require_table(path, self._connection.execute(rows.FOUND).fetchone())
                self._connection.execute("BEGIN")  # what can be read may not take another record
                self._connection.execute(rows.INSERT, (b"", 0))
                self._connection.execute("ROLLBACK")
                [[found]] = self._connection.execute("PRAGMA quick_check(1)").fetchall()
            _require(path, whole=found == "ok", cause=found)
            self.records()
        except BaseException:
            self._connection.close()
            raise

    def append(self, record: AnyRecord) -> None:
        body = rows.encode(record)
        with self._lock, sql_explained(self.folder / JOURNAL):
            [before] = self._connection.execute(rows.LAST).fetchone() or [0]
            self._connection.execute(rows.INSERT, (body, rows.mark(body, before)))

    def extend(self, records: Sequence[AnyRecord]) -> None:
        with self._lock, sql_explained(self.folder / JOURNAL):
            [before] = self._connection.execute(rows.LAST).fetchone() or [0]
            self._connection.execute("BEGIN")
            try:
                self._connection.executemany(rows.INSERT, rows.marked(records, before))
                self._connection.execute("COMMIT")
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    def records(self, after: int = 0) -> list[AnyRecord]:
        with self._lock, sql_explained(self.folder / JOURNAL):
            found = self._connection.execute(rows.SELECT, (after,)).fetchall()
        return _decode(self.folder, found, after)

    def save(self, number: int, state: State) -> None:
        checkpoints.save(self.folder / "checkpoints", number, state, durable=self._durable)

    def load(self, number: int) -> State:
        return checkpoints.load(self.folder / "checkpoints", number)

    def export(self) -> Path:
        """Write the journal as JSON lines beside the database; return the path."""
        path = self.folder / "journal.jsonl"
        path.write_bytes(b"".join(rows.encode(record) + b"\n" for record in self.records()))
        return path

    def close(self) -> None:
        """Close the database, after whatever a thread is still writing."""
        with self._lock:
            self._connection.close()


def read(folder: Path, after: int = 0) -> list[AnyRecord]:
    """Return a run's records while another process may be writing, leaving out the first `after`.

    Raises:
        CorruptFile: The journal cannot be read.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return _decode(folder, _rows(folder, after), after)
        except sqlite3.DatabaseError as error:
            # Between a writer's last words and its end, its shared memory file goes away under a reader's feet.
            if attempt == ATTEMPTS or error.sqlite_errorcode != sqlite3.SQLITE_CANTOPEN:
                raise CorruptFile(f"{folder / JOURNAL}: {error}") from error
        except UnicodeDecodeError as error:
            raise CorruptFile(f"{folder / JOURNAL}: {error}") from error
    return []


def _rows(folder: Path, after: int) -> list[rows.Row]:
    """Return the rows from number `after` on."""
    with closing(sqlite3.connect(to_read(folder / JOURNAL), uri=True)) as connection:
        if not (table := connection.execute(rows.FOUND).fetchone()):
            return []  # the writer has made the file and not yet the table
        _require_table(folder / JOURNAL, table)
        return connection.execute(rows.SELECT, (after,)).fetchall()


def _require_table(path: Path, found: tuple[bytes] | None) -> None:
    whole = found == (rows.TABLE.encode(),)
    _require(path, whole=whole, cause="its table of records is not ours, or of an earlier version")


def _require(path: Path, *, whole: bool, cause: str) -> None:
    if not whole:
        raise CorruptFile(f"{path}: {cause}")


def _decode(folder: Path, found: list[rows.Row], after: int = 0) -> list[AnyRecord]:
    """Return the records of rows that begin with the number `after`, but not that row's own."""
    before = found[0][1] if after and found else 0
    try:
        return rows.decode(found[bool(after) :], before)
    except CorruptFile as error:
        raise CorruptFile(f"{folder / JOURNAL}: {error}") from error
