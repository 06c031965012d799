"""Hash-chained journal rows in SQLite (WAL mode): written by one process, read by others, salvaged where damaged.

A mark covers its row and the mark before it, so that no row changes or goes unnoticed. What a damaged journal still
holds are the records before the damage, which are a run as it stood earlier.
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
from shared.errors import ConfigError, CorruptFile
from shared.runtime.durable import drop_oldest, explain_disk_errors, sync, unused_name

TABLE = "CREATE TABLE records (seq INTEGER PRIMARY KEY, body TEXT NOT NULL, mark INTEGER)"
SCHEMA = TABLE.replace("TABLE", "TABLE IF NOT EXISTS")
FOUND = "SELECT CAST(sql AS BLOB) FROM sqlite_master WHERE name = 'records'"
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


def row_mark(body: bytes, before: int) -> int:
    """Return the mark of a row whose predecessor has the mark `before`, 0 for the first: XXH3-64 without its last bit.

    SQLite itself finds damage of its pages' structure only, and its integers have a sign.
    """
    return xxhash.xxh3_64_intdigest(body, seed=before) >> 1


def marked_rows(records: Iterable[AnyRecord], before: int) -> Iterator[Row]:
    """Yield the rows of records that follow a row with the mark `before`."""
    for record in records:
        body = encode(record)
        before = row_mark(body, before)
        yield body, before


def decode(rows: Iterable[Row], before: int = 0) -> list[AnyRecord]:
    """Return the records of rows that follow a row with the mark `before`.

    Raises:
        CorruptFile: A row is not as it was written, or one is missing.
    """
    records = []
    for body, found in rows:
        try:
            records.append(_decoder.decode(body))
            before = row_mark(body, before)
        except (msgspec.DecodeError, RecursionError, TypeError, ValueError) as error:  # TypeError: it is no text
            raise CorruptFile(f"record {len(records) + 1}: {error}") from error
        if found != before:
            raise CorruptFile(f"record {len(records)} or the one before it is not as it was written")
    return records


def intact_records(rows: Iterable[Row]) -> list[AnyRecord]:
    """Return the records up to the first row that is not as it was written."""
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
    """Put a journal of what is whole in the place of a damaged one, which is set aside.

    At any moment one of both is there under the journal's name. What the old one had not yet taken over from its
    write-ahead log is set aside with it: the new one must not take it over.

    Raises:
        Unwritable: The disk takes nothing more.
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
    log.error("%s: set aside as %s, going on from its %d records that are whole", cause, unused.name, len(records))


def _salvaged_rows(journal: Path) -> Iterator[Row]:
    with (
        suppress(sqlite3.Error, UnicodeDecodeError),
        closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as connection,
    ):
        if connection.execute(FOUND).fetchone() == (TABLE.encode(),):  # a view may go on for ever
            yield from connection.execute(SELECT, (0,))


def _write_beside(journal: Path, records: Iterable[AnyRecord]) -> Path:
    """Write a journal of records under another name; return its path."""
    path = journal.with_name(f"{journal.name}.part")
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(SCHEMA)
        connection.executemany(INSERT, marked_rows(records, 0))
    return path


class SqliteJournal:
    """One run's folder. May be used from several threads, one call at a time."""

    def __init__(self, folder: Path, *, durable: bool = True, updates: Path | None = None) -> None:
        """Open or create a run's folder; a damaged journal is set aside, and what of it is whole is gone on with.

        Args:
            durable: Whether to wait for the disk: until a record is on it, and where it is full, for room.
            updates: Where accepted updates lie, if not in the run's folder.

        Raises:
            Unwritable: The disk takes nothing more.
        """
        with explain_disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.updates, self.retry_s = folder, updates or folder / "updates", RETRY_S if durable else None
        self._path = folder / JOURNAL
        self._lock, self.durable = threading.RLock(), durable
        self._beside = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")
        self._taking_over: Future[None] | None = None
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
                _require_table(path, self._connection.execute(FOUND).fetchone())
                self._connection.execute("BEGIN")  # what can be read may not take another record
                self._connection.execute(INSERT, (b"", 0))
                self._connection.execute("ROLLBACK")
                [[found]] = self._connection.execute("PRAGMA quick_check(1)").fetchall()
                self._second.execute(FOUND).fetchone()  # opens the log, which may be deleted later
            _require(path, whole=found == "ok", cause=found)
            self.records()
            self._identity = file_identity(path)
        except BaseException:
            self._disconnect()
            raise

    def _disconnect(self) -> None:
        self._second.close()
        self._connection.close()  # the last one, which takes the log with it

    def append(self, record: AnyRecord) -> None:
        """Add a record durably; soon after a round all are in the database itself: a copy of the file is the run.

        That takes two more waits for the disk, which the next round does not wait for.
        """
        body = encode(record)
        with self._lock, translate_sql_errors(self._path):
            self._restore_deleted()
            [before] = self._connection.execute(LAST).fetchone() or [0]
            self._connection.execute(INSERT, (body, row_mark(body, before)))
            if self.durable and isinstance(record, RunOpened | RoundClosed | RunClosed):
                self._taking_over = self._beside.submit(self._take_over_log, self._second)
        if isinstance(record, RunOpened | RunClosed):
            self.settle()

    @staticmethod
    def _take_over_log(connection: sqlite3.Connection) -> None:
        """Copy what is in the log into the database; others may write meanwhile."""
        with suppress(sqlite3.Error):  # the records are safe in the log; a full disk is told with the next one
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def settle(self) -> None:
        """Wait until the database's file alone has all records up to the last round that was closed."""
        if taking_over := self._taking_over:
            taking_over.result()

    def extend(self, records: Sequence[AnyRecord]) -> None:
        with self._lock, translate_sql_errors(self.folder / JOURNAL):
            self._restore_deleted()
            [before] = self._connection.execute(LAST).fetchone() or [0]
            self._connection.execute("BEGIN")
            try:
                self._connection.executemany(INSERT, marked_rows(records, before))
                self._connection.execute("COMMIT")
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    def _restore_deleted(self) -> None:
        """Write the journal anew where its file was deleted: the open database still has every record."""
        path = self._path
        if (found := file_identity(path)) == self._identity:
            return
        if found:
            raise ConfigError(f"{path} was replaced by another file while its run was going on: this process ends")
        held = _decode(self.folder, self._connection.execute(SELECT, (0,)).fetchall())
        with explain_disk_errors(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            partial = _write_beside(path, held)
            self.settle()
            self._disconnect()  # takes the log with it, which must not be taken over
            path.with_name(f"{JOURNAL}-wal").unlink(missing_ok=True)
            path.with_name(f"{JOURNAL}-shm").unlink(missing_ok=True)
            partial.replace(path)
            sync(self.folder)
        self._open()
        log.error("%s was deleted while its run was going on: written anew, with all its %d records", path, len(held))

    def records(self, after: int = 0) -> list[AnyRecord]:
        with self._lock, translate_sql_errors(self.folder / JOURNAL):
            found = self._connection.execute(SELECT, (after,)).fetchall()
        return _decode(self.folder, found, after)

    def export(self) -> Path:
        """Write the journal as JSON lines beside the database; return the path."""
        path = self.folder / "journal.jsonl"
        with self._lock, translate_sql_errors(self._path):
            rows = self._connection.execute(SELECT, (0,)).fetchall()
        path.write_bytes(b"".join(body + b"\n" for body, _ in rows))
        return path

    def close(self) -> None:
        """Close the database, after whatever a thread is still writing."""
        with self._lock:
            self.settle()
            self._disconnect()
            self._beside.shutdown()


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


def last_record(folder: Path) -> AnyRecord | None:
    """Return the last record of a run, without reading the others; None where there is none.

    Raises:
        CorruptFile: The journal cannot be read.
    """
    try:
        with closing(sqlite3.connect(read_only_uri(folder / JOURNAL), uri=True)) as connection:
            row = connection.execute(LAST_BODY).fetchone() if connection.execute(FOUND).fetchone() else None
        return _decoder.decode(row[0]) if row else None
    except (sqlite3.DatabaseError, msgspec.MsgspecError) as error:
        raise CorruptFile(f"{folder / JOURNAL}: {error}") from error


def _rows(folder: Path, after: int) -> list[Row]:
    """Return the rows from number `after` on."""
    with closing(sqlite3.connect(read_only_uri(folder / JOURNAL), uri=True)) as connection:
        if not (table := connection.execute(FOUND).fetchone()):
            return []  # the writer has made the file and not yet the table
        _require_table(folder / JOURNAL, table)
        return connection.execute(SELECT, (after,)).fetchall()


def _require_table(path: Path, found: tuple[bytes] | None) -> None:
    whole = found == (TABLE.encode(),)
    _require(path, whole=whole, cause="its table of records is not ours, or of an earlier version")


def _require(path: Path, *, whole: bool, cause: str) -> None:
    if not whole:
        raise CorruptFile(f"{path}: {cause}")


def _decode(folder: Path, found: list[Row], after: int = 0) -> list[AnyRecord]:
    """Return the records of rows that begin with the number `after`, but not that row's own."""
    before = found[0][1] if after and found else 0
    try:
        return decode(found[bool(after) :], before)
    except CorruptFile as error:
        raise CorruptFile(f"{folder / JOURNAL}: {error}") from error
