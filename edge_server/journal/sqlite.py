"""SQLite journal: hash-chained rows, one writer, salvage of damaged files.

Each row's mark covers the row and the previous mark, so that changed or missing rows are noticed. The records before
the damage are intact: they are the run at an earlier time. Files are in WAL mode, so others can read meanwhile.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import TypeAlias

import msgspec
import xxhash

from edge_server.journal.disk import RETRY_S, file_identity, read_only_uri, translate_sql_errors
from edge_server.journal.recordable import encode_recordable
from edge_server.journal.records import AnyRecord, RoundClosed, RunClosed, RunOpened
from edge_server.plan.removed_keys import without_removed_keys
from shared.errors import ConfigError, CorruptFile
from shared.runtime.durable import drop_oldest, explain_disk_errors, sync, unused_name

TABLE = "CREATE TABLE records (seq INTEGER PRIMARY KEY, body TEXT NOT NULL, mark INTEGER)"
SCHEMA = TABLE.replace("TABLE", "TABLE IF NOT EXISTS")
TABLE_SQL = "SELECT CAST(sql AS BLOB) FROM sqlite_master WHERE name = 'records'"
INSERT = "INSERT INTO records (body, mark) VALUES (CAST(? AS TEXT), ?)"
SELECT = "SELECT CAST(body AS BLOB), mark FROM records WHERE rowid >= ? ORDER BY rowid"
LAST = "SELECT mark FROM records ORDER BY rowid DESC LIMIT 1"
LAST_BODY = "SELECT CAST(body AS BLOB) FROM records ORDER BY rowid DESC LIMIT 1"

Row: TypeAlias = tuple[bytes, int]

_encoder = msgspec.json.Encoder(order="deterministic")
_decoder: msgspec.json.Decoder[AnyRecord] = msgspec.json.Decoder(AnyRecord)

log = logging.getLogger(__name__)
JOURNAL = "journal.sqlite"
ATTEMPTS = 50


def encode(record: AnyRecord) -> bytes:
    """Return a record as a line of JSON.

    Raises:
        Unrecordable: It could not be read back.
    """
    return encode_recordable(record, _encoder, _decoder)


def _decode_body(body: bytes) -> AnyRecord:
    """Decode a row; a plan of an earlier version may have keys that were removed since."""
    return _decoder.decode(without_removed_keys(body) if b'"RunOpened"' in body else body)


def row_mark(body: bytes, before: int) -> int:
    """Return the mark of a row after a row with mark `before` (0 for the first): XXH3-64 without its last bit.

    SQLite itself detects only structural damage of its pages; its integers are signed.
    """
    return xxhash.xxh3_64_intdigest(body, seed=before) >> 1


def marked_rows(records: Iterable[AnyRecord], before: int) -> Iterator[Row]:
    """Yield the rows of records that follow a row with mark `before`."""
    for record in records:
        body = encode(record)
        before = row_mark(body, before)
        yield body, before


def decode(rows: Iterable[Row], before: int = 0) -> list[AnyRecord]:
    """Return the records of rows that follow a row with mark `before`.

    Raises:
        CorruptFile: A row was changed or is missing.
    """
    records = []
    for body, mark in rows:
        try:
            records.append(_decode_body(body))
            before = row_mark(body, before)
        except (msgspec.DecodeError, RecursionError, TypeError, ValueError) as error:  # TypeError: it is no text
            raise CorruptFile(f"record {len(records) + 1}: {error}") from error
        if mark != before:
            raise CorruptFile(f"record {len(records)} or the one before it was changed")
    return records


def intact_records(rows: Iterable[Row]) -> list[AnyRecord]:
    """Return the records up to the first damaged row."""
    records: list[AnyRecord] = []
    before = 0
    for row in rows:
        try:
            records += decode([row], before)
        except CorruptFile:
            break
        before = row[1]
    return records


def salvageable_records(journal: Path) -> list[AnyRecord]:
    """Return the records of a journal up to the damage."""
    return intact_records(_salvaged_rows(journal))


def salvage(journal: Path, cause: Exception) -> None:
    """Replace a damaged journal by its intact records and set the damaged file aside.

    Either file is under the journal's name at any moment. The old write-ahead log is set aside too: the new file must
    not apply it.

    Raises:
        Unwritable: The disk is full.
    """
    records = salvageable_records(journal)
    with explain_disk_errors(journal):
        partial = _write_beside(journal, records)
        unused = unused_name(journal)
        os.link(journal, unused)
        with suppress(FileNotFoundError):
            journal.with_name(f"{journal.name}-wal").replace(f"{unused}-wal")
        journal.with_name(f"{journal.name}-shm").unlink(missing_ok=True)
        partial.replace(journal)
        sync(journal.parent)
        drop_oldest(journal.parent.glob("*.corrupt-*[0-9]"))
        drop_oldest(journal.parent.glob("*.corrupt-*-wal"))
    log.error("%s; set aside as %s, continuing from its %d intact records", cause, unused.name, len(records))


def _salvaged_rows(journal: Path) -> Iterator[Row]:
    with (
        suppress(sqlite3.Error, UnicodeDecodeError),
        closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as connection,
    ):
        if connection.execute(TABLE_SQL).fetchone() == (TABLE.encode(),):  # a view may never end
            yield from connection.execute(SELECT, (0,))


def _write_beside(journal: Path, records: Iterable[AnyRecord]) -> Path:
    """Write a journal of records under a temporary name; return its path."""
    path = journal.with_name(f"{journal.name}.part")
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(SCHEMA)
        connection.executemany(INSERT, marked_rows(records, 0))
    return path


class SqliteJournal:
    """Journal in a run's folder. May be used from several threads, one call at a time."""

    def __init__(self, folder: Path, *, durable: bool = True, updates: Path | None = None) -> None:
        """Open or create a run's folder; a damaged journal is set aside and continued from its intact records.

        Args:
            durable: Whether to wait until records are on the disk, and for room if it is full.
            updates: Folder of accepted updates, if not in the run's folder.

        Raises:
            Unwritable: The disk is full.
        """
        with explain_disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.updates, self.retry_s = folder, updates or folder / "updates", RETRY_S if durable else None
        self._path = folder / JOURNAL
        self._lock, self.durable = threading.RLock(), durable
        self._beside = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")
        self._checkpoint: Future[None] | None = None
        try:
            self._open()
        except CorruptFile as error:
            salvage(folder / JOURNAL, error)
            self._open()

    def _open(self) -> None:
        path = self.folder / JOURNAL
        with translate_sql_errors(path):
            self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._second = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        try:
            with translate_sql_errors(path):
                self._connection.execute("PRAGMA journal_mode = WAL")
                self._connection.execute(f"PRAGMA synchronous = {'FULL' if self.durable else 'OFF'}")
                self._connection.execute(SCHEMA)
                _require_table(path, self._connection.execute(TABLE_SQL).fetchone())
                self._connection.execute("BEGIN")  # what can be read may not take another record
                self._connection.execute(INSERT, (b"", 0))
                self._connection.execute("ROLLBACK")
                [[verdict]] = self._connection.execute("PRAGMA quick_check(1)").fetchall()
                self._second.execute(TABLE_SQL).fetchone()  # opens the log, which may be deleted later
            _require(path, is_intact=verdict == "ok", cause=verdict)
            self.records()
            self._identity = file_identity(path)
        except BaseException:
            self._disconnect()
            raise

    def _disconnect(self) -> None:
        self._second.close()
        self._connection.close()  # the last connection deletes the log

    def append(self, record: AnyRecord) -> None:
        """Add a record durably; see `extend`."""
        self.extend((record,))

    def extend(self, records: Sequence[AnyRecord]) -> None:
        """Add all records durably in one transaction, or none.

        Soon after a round the database file alone holds all records, so it can be copied. This checkpoint takes two
        more disk waits, which the next round does not wait for.
        """
        with self._lock, translate_sql_errors(self._path):
            self._restore_deleted()
            [before] = self._connection.execute(LAST).fetchone() or [0]
            self._connection.execute("BEGIN")
            try:
                self._connection.executemany(INSERT, marked_rows(records, before))
                self._connection.execute("COMMIT")
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
            if self.durable and any(isinstance(record, RunOpened | RoundClosed | RunClosed) for record in records):
                self._checkpoint = self._beside.submit(self._checkpoint_log, self._second)
        if any(isinstance(record, RunOpened | RunClosed) for record in records):
            self.settle()

    @staticmethod
    def _checkpoint_log(connection: sqlite3.Connection) -> None:
        """Copy the log into the database while others may write."""
        with suppress(sqlite3.Error):  # the records are safe in the log; a full disk is told with the next one
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def settle(self) -> None:
        """Wait until the database file alone holds all records up to the last closed round."""
        if taking_over := self._checkpoint:
            taking_over.result()

    def _restore_deleted(self) -> None:
        """Rewrite the journal if its file was deleted: the open database still has every record."""
        path = self._path
        if (identity := file_identity(path)) == self._identity:
            return
        if identity:
            raise ConfigError(f"{path} was replaced by another file during its run; restart the server")
        records = _decode(self.folder, self._connection.execute(SELECT, (0,)).fetchall())
        with explain_disk_errors(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            partial = _write_beside(path, records)
            self.settle()
            self._disconnect()  # deletes the log, which must not be applied
            path.with_name(f"{JOURNAL}-wal").unlink(missing_ok=True)
            path.with_name(f"{JOURNAL}-shm").unlink(missing_ok=True)
            partial.replace(path)
            sync(self.folder)
        self._open()
        log.error("%s was deleted during its run; restored with all its %d records", path, len(records))

    def records(self, after: int = 0) -> list[AnyRecord]:
        with self._lock, translate_sql_errors(self.folder / JOURNAL):
            rows = self._connection.execute(SELECT, (after,)).fetchall()
        return _decode(self.folder, rows, after)

    def export(self) -> Path:
        """Write the journal as JSON lines beside the database; return the path."""
        path = self.folder / "journal.jsonl"
        with self._lock, translate_sql_errors(self._path):
            rows = self._connection.execute(SELECT, (0,)).fetchall()
        path.write_bytes(b"".join(body + b"\n" for body, _ in rows))
        return path

    def close(self) -> None:
        """Close the database after pending writes."""
        with self._lock:
            self.settle()
            self._disconnect()
            self._beside.shutdown()


def read_records(folder: Path, after: int = 0) -> list[AnyRecord]:
    """Return a run's records without the first `after`, even while another process writes.

    Raises:
        CorruptFile: The journal cannot be read.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return _decode(folder, _rows(folder, after), after)
        except sqlite3.DatabaseError as error:
            # While a writer shuts down, its shared memory file may vanish during a read.
            if attempt == ATTEMPTS or error.sqlite_errorcode != sqlite3.SQLITE_CANTOPEN:
                raise CorruptFile(f"{folder / JOURNAL}: {error}") from error
        except UnicodeDecodeError as error:
            raise CorruptFile(f"{folder / JOURNAL}: {error}") from error
    return []


def last_record(folder: Path) -> AnyRecord | None:
    """Return the last record of a run without reading the others; None if there is none.

    Raises:
        CorruptFile: The journal cannot be read.
    """
    try:
        with closing(sqlite3.connect(read_only_uri(folder / JOURNAL), uri=True)) as connection:
            row = connection.execute(LAST_BODY).fetchone() if connection.execute(TABLE_SQL).fetchone() else None
        return _decode_body(row[0]) if row else None
    except (sqlite3.DatabaseError, msgspec.MsgspecError) as error:
        raise CorruptFile(f"{folder / JOURNAL}: {error}") from error


def _rows(folder: Path, after: int) -> list[Row]:
    with closing(sqlite3.connect(read_only_uri(folder / JOURNAL), uri=True)) as connection:
        if not (table := connection.execute(TABLE_SQL).fetchone()):
            return []  # the writer has created the file but not the table yet
        _require_table(folder / JOURNAL, table)
        return connection.execute(SELECT, (after,)).fetchall()


def _require_table(path: Path, table_sql: tuple[bytes] | None) -> None:
    is_intact = table_sql == (TABLE.encode(),)
    _require(path, is_intact=is_intact, cause="its table of records is missing or of an earlier version")


def _require(path: Path, *, is_intact: bool, cause: str) -> None:
    if not is_intact:
        raise CorruptFile(f"{path}: {cause}")


def _decode(folder: Path, rows: list[Row], after: int = 0) -> list[AnyRecord]:
    """Return the records of rows after row number `after`, which comes first."""
    before = rows[0][1] if after and rows else 0
    try:
        return decode(rows[bool(after) :], before)
    except CorruptFile as error:
        raise CorruptFile(f"{folder / JOURNAL}: {error}") from error
