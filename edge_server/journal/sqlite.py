"""SQLite journal: hash-chained rows, one writer, salvage of damaged files.

Each row's mark covers the row and the previous mark, so that changed or missing rows are noticed. The records before
the damage are intact: they are the run at an earlier time. Files are in WAL mode, so others can read meanwhile.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec

from edge_server.journal.disk import RETRY_S, file_identity, read_only_uri, translate_sql_errors
from edge_server.journal.log_copier import LogCopier
from edge_server.journal.recordable import encode_recordable
from edge_server.journal.records import AnyRecord, RoundClosed, RunClosed, RunOpened
from edge_server.journal.stream import INDEX, RecordStream, Row, row_mark
from shared.errors import ConfigError, CorruptFile, Unwritable
from shared.protocol.messages import INLINE_BYTES, Transfer
from shared.protocol.payload import digest
from shared.runtime.durable import drop_oldest, explain_disk_errors, sync, unused_name
from shared.transfer import to_file

TABLE = "CREATE TABLE records (seq INTEGER PRIMARY KEY, body TEXT NOT NULL, mark INTEGER)"
SCHEMA = TABLE.replace("TABLE", "TABLE IF NOT EXISTS")
TABLE_SQL = "SELECT CAST(sql AS BLOB) FROM sqlite_master WHERE name = 'records'"
PAYLOADS = "CREATE TABLE payloads (name TEXT PRIMARY KEY, body BLOB NOT NULL)"
"""Small payloads of accepted updates, committed with their records; the next update of a name overwrites it."""
PAYLOADS_SCHEMA = PAYLOADS.replace("TABLE", "TABLE IF NOT EXISTS", 1)
PAYLOADS_SQL = TABLE_SQL.replace("records", "payloads")
PUT_PAYLOAD = "INSERT INTO payloads VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET body = excluded.body"
READ_PAYLOAD = "SELECT CAST(body AS BLOB) FROM payloads WHERE name = ?"
READ_PAYLOADS = "SELECT rowid, name, CAST(body AS BLOB) FROM payloads ORDER BY rowid"
INSERT = "INSERT INTO records (body, mark) VALUES (CAST(? AS TEXT), ?)"
COUNT = "SELECT ifnull(max(rowid), 0) FROM records"
HAS_INDEX = "SELECT count(*) FROM sqlite_master WHERE sql = ?"  # not one that damage has changed
CHECK = "PRAGMA integrity_check(1)"  # of the pages, and that the index has every rare record
LAST = "SELECT mark FROM records ORDER BY rowid DESC LIMIT 1"

R = TypeVar("R")
T = TypeVar("T")

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


def marked_rows(records: Iterable[T], before: int, encode: Callable[[T], bytes]) -> Iterator[tuple[bytes, int]]:
    """Yield the rows of records that follow a row with mark `before`."""
    for record in records:
        body = encode(record)
        before = row_mark(body, before)
        yield body, before


def intact_records(journal: Path) -> RecordStream:
    """Return the records of a journal up to the damage, if there is any."""

    def fetch(sql: str, parameters: tuple[int | str, ...], rows: int, size: int) -> list[Row]:
        with (
            suppress(sqlite3.Error, UnicodeDecodeError),
            closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as connection,
        ):
            if connection.execute(TABLE_SQL).fetchone() == (TABLE.encode(),):  # a view may never end
                return _fetch(connection, sql, parameters, rows, size, until_error=True)
        return []

    # The index may be damaged too, and rows beyond a damaged one are not read.
    every, until = RecordStream(journal, fetch, until=sys.maxsize, has_index=False), 0
    with suppress(CorruptFile):
        for until, _ in every.enumerate_records():  # noqa: B007
            pass
    return replace(every, until=until)


def _intact_payloads(journal: Path) -> dict[str, bytes]:
    """Return the payloads of a journal that can be read; whoever uses one compares its digest."""
    payloads, last = dict[str, bytes](), 0
    with (
        suppress(sqlite3.Error, UnicodeDecodeError),
        closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as connection,
    ):
        if connection.execute(PAYLOADS_SQL).fetchone() == (PAYLOADS.encode(),):
            for number, name, body in connection.execute(READ_PAYLOADS):
                if number <= last:
                    break  # damaged pages may be out of order
                payloads[name], last = body, number
    return payloads


def readable_records(folder: Path) -> RecordStream:
    """Return the records of a run; of a damaged journal, those up to the damage."""
    try:
        return open_records(folder)
    except CorruptFile:
        return intact_records(folder / JOURNAL)


def salvage(journal: Path, cause: Exception) -> None:
    """Replace a damaged journal by its intact records and set the damaged file aside.

    Either file is under the journal's name at any moment. The old write-ahead log is set aside too: the new file must
    not apply it.

    Raises:
        Unwritable: The disk is full.
    """
    records = intact_records(journal)
    with explain_disk_errors(journal):
        partial = _write_beside(journal, records, _intact_payloads(journal))
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


def _write_beside(journal: Path, records: Iterable[AnyRecord], payloads: Mapping[str, bytes]) -> Path:
    """Write a journal of records and payloads under a temporary name; return its path."""
    path = journal.with_name(f"{journal.name}.part")
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(SCHEMA)
        connection.execute(INDEX)
        connection.executemany(INSERT, marked_rows(records, 0, encode))
        if payloads:
            connection.execute(PAYLOADS)
            connection.executemany(PUT_PAYLOAD, payloads.items())
    return path


@dataclass
class _Write:
    """Records and payloads of one call of `extend`.

    Attributes:
        may_wait: Whether it is deferred until the next write.
        error: Why it was not written.
    """

    bodies: Sequence[bytes]
    payloads: Mapping[str, bytes]
    may_wait: bool
    ends_run: bool
    error: Exception | None = None


class SqliteJournal:
    """Journal in a run's folder. May be used from several threads, one call at a time.

    Attributes:
        lock: Held while records are written or read.
        waiting: Records to write, of all threads.
    """

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
        self.lock, self.durable = threading.RLock(), durable
        self.waiting = deque[_Write]()
        self._copier = LogCopier(self._commit_waiting)
        try:
            self._open()
        except CorruptFile as error:
            salvage(folder / JOURNAL, error)
            self._open()

    def _open(self) -> None:
        path = self.folder / JOURNAL
        with translate_sql_errors(path):
            self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._copier.connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        try:
            with translate_sql_errors(path):
                self._connection.execute("PRAGMA journal_mode = WAL")
                self._connection.execute(f"PRAGMA synchronous = {'FULL' if self.durable else 'OFF'}")
                self._connection.execute("BEGIN")
                self._connection.execute(SCHEMA)
                if self.durable:
                    self._connection.execute("PRAGMA secure_delete = ON")  # others may get a copy of the file
                    self._connection.execute(PAYLOADS_SCHEMA)
                    require_table(path, self._connection.execute(PAYLOADS_SQL).fetchone(), PAYLOADS)
                require_table(path, self._connection.execute(TABLE_SQL).fetchone())
                self._connection.execute(INDEX.replace("INDEX", "INDEX IF NOT EXISTS", 1))  # journals of 0.1 have none
                self._connection.execute("COMMIT")
                self._connection.execute("BEGIN")  # what can be read may not take another record
                self._connection.execute(INSERT, (b"", 0))
                self._connection.execute("ROLLBACK")
                _check(path, self._connection)
                self._has_index = _has_index(self._connection)
                self._copier.connection.execute(TABLE_SQL).fetchone()  # opens the log, which may be deleted later
            self._read_written().verify()
            self._identity = file_identity(path)
        except BaseException:
            self._disconnect()
            raise

    def _disconnect(self) -> None:
        if self._copier.connection:
            self._copier.connection.close()
        self._connection.close()  # the last connection deletes the log

    def append(self, record: AnyRecord) -> None:
        """Add a record durably; see `extend`."""
        self.extend((record,))

    def extend(
        self, records: Sequence[AnyRecord], payloads: Mapping[str, bytes] = {}, *, may_wait: bool = False
    ) -> None:
        """Add all records durably in one transaction, or none; calls of several threads share one.

        Payloads are part of it; without durability they are files, as larger ones are.
        Soon after a round the database file alone holds all records, so it can be copied.

        Args:
            may_wait: Whether to write the records with the next ones, or in `log_copier.PAUSE_S`.
        """
        kinds, bodies = {type(record) for record in records}, [encode(record) for record in records]
        write = _Write(bodies, payloads, may_wait=may_wait and self.durable, ends_run=RunClosed in kinds)
        self.waiting.append(write)
        if self.durable and not kinds.isdisjoint((RunOpened, RoundClosed, RunClosed)):
            self._copier.schedule()
        if write.may_wait:
            return
        self._commit_waiting()
        if write.error:
            raise write.error
        if not kinds.isdisjoint((RunOpened, RunClosed)):
            self.settle()

    def _commit_waiting(self) -> None:
        """Write what all threads have to write; after an error, deferred records stay for the next call."""
        with self.lock:
            writes = list[_Write]()
            while self.waiting:
                writes.append(self.waiting.popleft())
            if not writes:
                return
            try:
                with translate_sql_errors(self._path):
                    self._restore_deleted()
                    self._write(writes)
            except BaseException as error:
                ordinary = error if isinstance(error, Exception) else None
                for write in writes:  # each writer raises it; one of another thread must not believe in its record
                    write.error = ordinary or Unwritable(f"{self._path}: interrupted by {error!r}")
                self.waiting.extendleft(write for write in reversed(writes) if write.may_wait)
                if not ordinary:
                    raise

    def _write(self, writes: Sequence[_Write]) -> None:
        [before] = self._connection.execute(LAST).fetchone() or [0]
        bodies = [body for write in writes for body in write.bodies]
        payloads = {name: content for write in writes for name, content in write.payloads.items()}
        self._connection.execute("BEGIN")
        try:
            self._connection.executemany(INSERT, marked_rows(bodies, before, bytes))
            if self.durable:
                self._connection.executemany(PUT_PAYLOAD, payloads.items())
                if any(write.ends_run for write in writes):
                    self._connection.execute("DELETE FROM payloads")
            elif payloads:
                with explain_disk_errors(self.updates):
                    self.updates.mkdir(parents=True, exist_ok=True)
                    for name, content in payloads.items():
                        (self.updates / name).write_bytes(content)
            self._connection.execute("COMMIT")
        finally:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")

    def read_payload(self, name: str, transfer: Transfer) -> memoryview:
        """Return an accepted update's payload; that of a large file is not verified.

        Raises:
            FileNotFoundError: It was deleted, or another update has replaced it.
        """
        path = self.updates / name
        if not self.durable or transfer.size > INLINE_BYTES:
            return to_file.view(path)
        with self.lock, translate_sql_errors(self._path):
            row = self._connection.execute(READ_PAYLOAD, (name,)).fetchone()
        content = memoryview(bytearray(row[0] if row else b""))  # writable, as a mapped file is
        if digest([content]) != transfer.digest:  # it came in frames
            content = to_file.view(path)
            if digest([content]) != transfer.digest:  # a damaged row, and a file of another round or device
                raise FileNotFoundError(f"{path} has the content of another update")
        return content

    def settle(self) -> None:
        """Wait until the database file alone holds all records up to the last closed round."""
        self._copier.settle()

    def _restore_deleted(self) -> None:
        """Rewrite the journal if its file was deleted: the open database still has every record."""
        path = self._path
        if (identity := file_identity(path)) == self._identity:
            return
        if identity:
            raise ConfigError(f"{path} was replaced by another file during its run; restart the server")
        records = self._read_written()
        payloads = {name: body for _, name, body in self._connection.execute(READ_PAYLOADS)} if self.durable else {}
        with explain_disk_errors(path), self._copier.copying:
            self.folder.mkdir(parents=True, exist_ok=True)
            partial = _write_beside(path, records, payloads)
            self._disconnect()  # deletes the log, which must not be applied
            path.with_name(f"{JOURNAL}-wal").unlink(missing_ok=True)
            path.with_name(f"{JOURNAL}-shm").unlink(missing_ok=True)
            partial.replace(path)
            sync(self.folder)
            self._open()
        log.error("%s was deleted during its run; restored with all its %d records", path, len(records))

    def records(self, after: int = 0) -> RecordStream:
        """Return the records so far without the first `after`; they can be read even after the journal is closed."""
        self._commit_waiting()
        return self._read_written(after)

    def _read_written(self, after: int = 0) -> RecordStream:
        with self.lock, translate_sql_errors(self._path):
            [[until]] = self._connection.execute(COUNT).fetchall()
        return RecordStream(self._path, self._fetch, until, self._has_index, after)

    def _fetch(self, sql: str, parameters: tuple[int | str, ...], rows: int, size: int) -> list[Row]:
        with self.lock, translate_sql_errors(self._path), suppress(sqlite3.ProgrammingError):  # it is closed
            return _fetch(self._connection, sql, parameters, rows, size)
        return read_database(self._path, lambda connection: _fetch(connection, sql, parameters, rows, size))

    def export(self) -> Path:
        """Write the journal as JSON lines beside the database; return the path."""
        path = self.folder / "journal.jsonl"
        with self.lock, translate_sql_errors(self._path):
            rows = self._connection.execute("SELECT CAST(body AS BLOB) FROM records ORDER BY rowid")
            with path.open("wb") as file:
                file.writelines(body + b"\n" for (body,) in rows)
        return path

    def close(self) -> None:
        """Close the database after pending writes."""
        self._commit_waiting()
        self._copier.close()
        with self.lock:
            self._disconnect()


def _fetch(
    connection: sqlite3.Connection,
    sql: str,
    parameters: tuple[int | str, ...],
    rows: int,
    size: int,
    *,
    until_error: bool = False,
) -> list[Row]:
    """Return the first rows of a query: at most `rows`, and none after `size` bytes of them."""
    fetched, fetched_bytes = list[Row](), 0
    try:
        with closing(connection.execute(sql, parameters)) as cursor:
            for row in cursor:
                if until_error and row[0] <= (fetched[-1][0] if fetched else parameters[0]):
                    break  # damaged pages may be out of order
                fetched.append(row)
                fetched_bytes += len(row[1] or b"")
                if len(fetched) == rows or fetched_bytes >= size:
                    break
    except (sqlite3.Error, UnicodeDecodeError):
        if not until_error:
            raise
    return fetched


def open_records(folder: Path, *, verify: bool = True) -> RecordStream:
    """Return the records that a run has now, even while another process writes.

    Args:
        verify: Whether to check the whole journal now; without, each record is checked when it is read.

    Raises:
        CorruptFile: The journal cannot be read.
    """
    path = folder / JOURNAL

    def find_end(connection: sqlite3.Connection) -> tuple[int, bool]:
        if not (table := connection.execute(TABLE_SQL).fetchone()):
            return 0, False  # the writer has created the file but not the table yet
        require_table(path, table)
        if verify:
            _check(path, connection)
        [[until]] = connection.execute(COUNT).fetchall()
        return until, _has_index(connection)

    def fetch(sql: str, parameters: tuple[int | str, ...], rows: int, size: int) -> list[Row]:
        return read_database(path, lambda connection: _fetch(connection, sql, parameters, rows, size))

    records = RecordStream(path, fetch, *read_database(path, find_end))
    if verify:
        records.verify()
    return records


def read_records(folder: Path, after: int = 0) -> list[AnyRecord]:
    """Return a run's records without the first `after`; see `open_records`."""
    return list(replace(open_records(folder, verify=False), after=after))


def _has_index(connection: sqlite3.Connection) -> bool:
    [[count]] = connection.execute(HAS_INDEX, (INDEX,)).fetchall()
    return bool(count)


def _check(path: Path, connection: sqlite3.Connection) -> None:
    [[verdict]] = connection.execute(CHECK).fetchall()
    if verdict != "ok":
        raise CorruptFile(f"{path}: {verdict}")


def require_table(path: Path, table_sql: tuple[bytes] | None, expected: str = TABLE) -> None:
    """Raise CorruptFile unless a table, by default that of the records, was created as expected."""
    if table_sql != (expected.encode(),):
        table = expected.split()[2]
        raise CorruptFile(f"{path}: its table of {table} is missing or of an earlier version")


def read_database(path: Path, read: Callable[[sqlite3.Connection], R], uri: str = "") -> R:
    """Read from a journal that another process may be writing.

    Args:
        uri: Opens it; as `read_only_uri` if empty.

    Raises:
        CorruptFile: The journal cannot be read.
    """
    attempt = 0
    while True:
        attempt += 1
        try:
            with closing(sqlite3.connect(uri or read_only_uri(path), uri=True)) as connection:
                return read(connection)
        except sqlite3.DatabaseError as error:
            # While a writer shuts down, its shared memory file may vanish during a read.
            if attempt < ATTEMPTS and error.sqlite_errorcode == sqlite3.SQLITE_CANTOPEN:
                continue
            problem = str(error)
            if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_READONLY and not os.access(
                path.parent, os.W_OK, effective_ids=True
            ):
                problem = f"its writer was killed; run the command once as a user who may write in {path.parent}"
            raise CorruptFile(f"{path}: {problem}") from error
        except UnicodeDecodeError as error:
            raise CorruptFile(f"{path}: {error}") from error


def last_record(folder: Path) -> AnyRecord | None:
    """Return the last record of a run without reading the others; None if there is none.

    Raises:
        CorruptFile: The journal cannot be read.
    """
    records = open_records(folder, verify=False)
    return next(iter(replace(records, after=records.until - 1)), None)
