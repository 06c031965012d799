"""Report history of a site in SQLite, bounded in days and bytes.

It outlives runs and can be read while the server writes it.
"""

from __future__ import annotations

import logging
import math
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import xxhash

from edge_server.journal import report_rows
from edge_server.journal.disk import file_identity, read_only_uri, translate_sql_errors
from edge_server.journal.report_rows import Form, ReportRow
from shared.errors import ConfigError, CorruptFile
from shared.protocol.measurements import Reading
from shared.protocol.messages import Report
from shared.runtime.durable import drop_oldest, explain_disk_errors, unused_name

T = TypeVar("T")

FILE = "readings.sqlite"
ATTEMPTS = 50

SCHEMA = """
CREATE TABLE IF NOT EXISTS devices (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, bytes INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS forms (
    id INTEGER PRIMARY KEY, device INTEGER NOT NULL, digest INTEGER NOT NULL, body BLOB NOT NULL,
    UNIQUE (device, digest)
);
CREATE TABLE IF NOT EXISTS reports (
    device INTEGER, seq INTEGER, heard_utc_s REAL, at REAL, form INTEGER, is_full INTEGER, body BLOB,
    PRIMARY KEY (device, seq)
) WITHOUT ROWID;
"""
TABLES = "SELECT name, type, sql FROM sqlite_master WHERE lower(name) IN ('devices', 'forms', 'reports')"
DEVICE = "SELECT id FROM devices WHERE name = ?"
DEVICES = "SELECT id, name FROM devices ORDER BY name"
LAST_FULL = "SELECT max(seq) FROM reports WHERE device = ? AND is_full"
FULL_BEFORE = "SELECT max(seq) FROM reports WHERE device = ? AND is_full AND heard_utc_s <= ?"
CHAIN = "SELECT seq, heard_utc_s, at, form, is_full, body FROM reports WHERE device = ? AND seq >= ? ORDER BY seq"
FORM_BY_ID = "SELECT body FROM forms WHERE id = ?"

log = logging.getLogger(__name__)
FULL_EVERY = 60
"""Rows from one full row to the next: the most that a reader decodes to restore a value."""

OVERHEAD_BYTES = 48
"""Size of a row besides its body."""

ALL = 1 << 62
INSERT = "INSERT INTO reports (device, seq, heard_utc_s, at, form, is_full, body) VALUES (?, ?, ?, ?, ?, ?, ?)"
NEW_SEQ = "SELECT max(seq) FROM reports WHERE device = ?"
NEW_DEVICE = "INSERT INTO devices (name, bytes) VALUES (?, 0)"
SPEND = "UPDATE devices SET bytes = bytes + ? WHERE id = ?"
FORM = "SELECT id FROM forms WHERE device = ? AND digest = ?"
NEW_FORM = "INSERT INTO forms (device, digest, body) VALUES (?, ?, ?)"
LARGEST = "SELECT id FROM devices ORDER BY bytes DESC LIMIT 1"
ENDS = "SELECT min(seq), max(seq) FROM reports WHERE device = ?"
FIRST_SINCE = "SELECT seq FROM reports WHERE device = ? AND heard_utc_s >= ? ORDER BY seq LIMIT 1"
FORGET = (
    "DELETE FROM reports WHERE device = :device AND seq < :until",
    "DELETE FROM forms WHERE device = :device AND id NOT IN (SELECT form FROM reports WHERE device = :device)",
    """UPDATE devices SET bytes =
        (SELECT coalesce(sum(length(body) + :overhead), 0) FROM reports WHERE device = :device) +
        (SELECT coalesce(sum(length(body) + :overhead), 0) FROM forms WHERE device = :device) WHERE id = :device""",
    "DELETE FROM devices WHERE id = :device AND bytes = 0",
)

PRAGMAS = ("page_count", "freelist_count", "page_size")


@dataclass(frozen=True)
class StoredReport:
    """A report of the history.

    Attributes:
        heard_utc_s: Calendar seconds on the server's clock at which it arrived.
        report: The part that is stored.
    """

    heard_utc_s: float
    report: Report


@dataclass(frozen=True)
class HistoryRow:
    """A decoded full row of a device's history; the next row's changes refer to it."""

    seq: int
    heard_utc_s: float
    at: float
    form_id: int
    form: Form
    row: ReportRow


def iterate_rows(connection: sqlite3.Connection, device: int, first: int) -> Iterator[HistoryRow]:
    """Yield a device's history from a row on; before the first full row, with changed values only.

    Args:
        device: Its number in the database.
        first: Number of the first row.

    Raises:
        CorruptFile: A row is damaged.
    """
    form_id, form, row = -1, Form("", "", (), {}, {}), ReportRow({})
    for seq, heard_utc_s, at, number, is_full, body in connection.execute(CHAIN, (device, first)):
        if not isinstance(at, float) or not math.isfinite(at):
            raise CorruptFile(f"a stored report is damaged: its time is {at}")
        if number != form_id:
            form_row = connection.execute(FORM_BY_ID, (number,)).fetchone()
            form_id, form = number, report_rows.decode_form(form_row[0] if form_row else b"")  # its first row is full
        changed = report_rows.decode_row(body)
        row = changed if is_full else report_rows.apply_changes(row, changed)
        yield HistoryRow(seq, heard_utc_s, at, form_id, form, row)


def last_row(connection: sqlite3.Connection, device: int) -> HistoryRow | None:
    """Return the last row of a device, None if there is none. Raises CorruptFile as `iterate_rows`."""
    first = connection.execute(LAST_FULL, (device,)).fetchone()[0] or 0
    return next(iter(deque(iterate_rows(connection, device, first), maxlen=1)), None)


def latest_reports(path: Path) -> dict[str, StoredReport]:
    """Return the last report of every device.

    Raises:
        ConfigError: There is no history.
        CorruptFile: It cannot be read.
    """

    def read(connection: sqlite3.Connection) -> dict[str, StoredReport]:
        rows = {name: last_row(connection, device) for device, name in connection.execute(DEVICES).fetchall()}
        return {
            name: StoredReport(link.heard_utc_s, report_rows.join_report(name, link.at, link.form, link.row))
            for name, link in rows.items()
            if link
        }

    return _query(path, read)


def reading_history(path: Path, device: str, name: str, since_utc_s: float = 0.0) -> list[tuple[float, Reading]]:
    """Return a reading of a device over time, with the calendar seconds at which the server received each.

    Args:
        since_utc_s: Earliest calendar second.

    Raises:
        ConfigError: There is no history.
        CorruptFile: It cannot be read.
    """

    def read(connection: sqlite3.Connection) -> list[tuple[float, Reading]]:
        number = (connection.execute(DEVICE, (device,)).fetchone() or [-1])[0]
        first = connection.execute(FULL_BEFORE, (number, since_utc_s)).fetchone()[0] or 0
        links = (link for link in iterate_rows(connection, number, first) if link.heard_utc_s >= since_utc_s)
        readings = ((link.heard_utc_s, report_rows.row_reading(name, link.at, link.form, link.row)) for link in links)
        return [(heard_utc_s, reading) for heard_utc_s, reading in readings if reading]

    return _query(path, read)


def forget_history(path: Path, device: str) -> int:
    """Remove a device from the history, even while a server writes it; return the number of reports removed.

    Raises:
        CorruptFile: The history cannot be read.
        Unwritable: It cannot be written.
    """
    database = closing(sqlite3.connect(path, isolation_level=None))
    with translate_sql_errors(path), explain_disk_errors(path.parent), database as connection:
        _require_tables(connection, path)
        connection.execute("BEGIN IMMEDIATE")
        device_row = connection.execute(DEVICE, (device,)).fetchone()
        if not device_row:
            return 0
        (count,) = connection.execute("SELECT count(*) FROM reports WHERE device = ?", device_row).fetchone()
        for statement in FORGET:
            connection.execute(statement, {"device": device_row[0], "until": ALL, "overhead": OVERHEAD_BYTES})
        connection.execute("COMMIT")
        return int(count)


def _require_tables(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a file whose tables are views, which may never end.

    Raises:
        CorruptFile: One is.
    """
    for name, kind, sql in connection.execute(TABLES):
        if kind != "table" or not sql.upper().startswith("CREATE TABLE"):
            raise CorruptFile(f"{path}: {name} is a {kind}, not the expected table; move the file away")


def _query(path: Path, read: Callable[[sqlite3.Connection], T]) -> T:
    if not path.is_file():
        raise ConfigError(f"{path}: no report history found; give the data_dir of a server")
    attempts = 0
    while True:
        try:
            with translate_sql_errors(path), closing(sqlite3.connect(read_only_uri(path), uri=True)) as connection:
                _require_tables(connection, path)
                return read(connection)
        except sqlite3.Error as error:
            # While a writer shuts down, its shared memory file may vanish during a read.
            attempts += 1
            if attempts == ATTEMPTS or error.sqlite_errorcode != sqlite3.SQLITE_CANTOPEN:
                raise CorruptFile(f"{path}: {error}") from error


SWEEP_S, DAY_S = 3600.0, 86_400.0


@dataclass
class ReportHistory:
    """The only writer of the history in this process; may be used from several threads.

    Attributes:
        folder: Folder of the file.
        keep_days: Maximum age of reports.
        max_bytes: Maximum size of the file. Beyond it, the device that uses most loses its oldest reports first, so
            that a talkative device does not displace the others.
    """

    folder: Path
    keep_days: float
    max_bytes: int
    _connection: sqlite3.Connection | None = None
    _identity: tuple[int, int] | None = None
    _swept_utc_s: float = 0.0
    _links: dict[str, tuple[int, HistoryRow, int]] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self.folder / FILE

    def write(self, batch: Sequence[StoredReport]) -> None:
        """Add reports, all or none; a damaged history is set aside and a new one begun.

        Raises:
            Unwritable: The disk is full, and the reports are dropped.
        """
        with self._lock:
            try:
                self._write(batch)
            except CorruptFile as error:
                self.close()
                unused = self._set_aside()
                log.error("%s; set aside as %s, starting a new history", error, unused.name)  # noqa: TRY400 - no fault
                self._write(batch)

    def close(self) -> None:
        """Close the file; the next write opens it again."""
        with self._lock:
            if self._connection:
                self._connection.close()
            self._connection, self._links = None, {}

    def _write(self, batch: Sequence[StoredReport]) -> None:
        with explain_disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        self._notice_deleted()
        with translate_sql_errors(self.path), self._connect() as connection:
            connection.execute("BEGIN IMMEDIATE")
            for stored in batch:
                self._add(connection, stored)
            self._forget(connection, max((stored.heard_utc_s for stored in batch), default=0.0))

    def _connect(self) -> sqlite3.Connection:
        if self._connection is None:
            connection = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None)
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = NORMAL")  # a power cut may cost the last reports
                connection.execute("PRAGMA journal_size_limit = 4194304")
                connection.executescript(SCHEMA)
                _require_tables(connection, self.path)
            except BaseException:
                connection.close()
                raise
            self._connection, self._identity = connection, file_identity(self.path)
        return self._connection

    def _notice_deleted(self) -> None:
        """Restore the file if it was deleted, from the open one, which still has every report."""
        if self._connection is None or (identity := file_identity(self.path)) == self._identity:
            return
        partial = self.path.with_name(f"{FILE}.part")
        if identity is None:
            with translate_sql_errors(self.path), explain_disk_errors(self.folder):
                partial.unlink(missing_ok=True)
                with closing(sqlite3.connect(partial)) as copy:
                    self._connection.backup(copy)
        self.close()
        if identity is None:
            with explain_disk_errors(self.folder):
                for suffix in ("-wal", "-shm"):
                    self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
                partial.replace(self.path)
            log.warning("%s was deleted; restored with all its reports", self.path)

    def _add(self, connection: sqlite3.Connection, stored: StoredReport) -> None:
        """Add a report unless it is the device's last one: retained messages arrive again after every restart."""
        report = stored.report
        device, link, since_full = self._find_device(connection, report.device)
        form, row = report_rows.split_report(report)
        if link and (link.form.instance, link.at) == (form.instance, report.at):
            return
        form_id = self._form(connection, device, form) if link is None or link.form != form else link.form_id
        is_full = link is None or link.form_id != form_id or since_full >= FULL_EVERY
        body = report_rows.encode_part(row if link is None or is_full else report_rows.row_changes(link.row, row))
        seq = link.seq + 1 if link else 1
        connection.execute(INSERT, (device, seq, stored.heard_utc_s, report.at, form_id, is_full, body))
        connection.execute(SPEND, (len(body) + OVERHEAD_BYTES, device))
        after = HistoryRow(seq, stored.heard_utc_s, report.at, form_id, form, row)
        self._links[report.device] = device, after, 1 if is_full else since_full + 1

    def _find_device(self, connection: sqlite3.Connection, name: str) -> tuple[int, HistoryRow | None, int]:
        """Return a device's number, its last row and the number of rows since a full one.

        The cache holds only if that row is still the last: another process may have written, or a write was undone.
        """
        if name in self._links:
            device, link, since_full = self._links[name]
            if connection.execute(NEW_SEQ, (device,)).fetchone()[0] == link.seq:
                return device, link, since_full
        device_row = connection.execute(DEVICE, (name,)).fetchone()
        if not device_row:
            return connection.execute(NEW_DEVICE, (name,)).lastrowid or 0, None, 0
        return device_row[0], last_row(connection, device_row[0]), FULL_EVERY

    def _form(self, connection: sqlite3.Connection, device: int, form: report_rows.Form) -> int:
        body = report_rows.encode_part(form)
        digest = xxhash.xxh3_64_intdigest(body) >> 1
        if form_row := connection.execute(FORM, (device, digest)).fetchone():
            return int(form_row[0])
        connection.execute(SPEND, (len(body) + OVERHEAD_BYTES, device))
        return connection.execute(NEW_FORM, (device, digest, body)).lastrowid or 0

    def _forget(self, connection: sqlite3.Connection, now_utc_s: float) -> None:
        if abs(now_utc_s - self._swept_utc_s) >= SWEEP_S:
            self._swept_utc_s = now_utc_s
            for (device,) in connection.execute("SELECT id FROM devices").fetchall():
                oldest = connection.execute(FIRST_SINCE, (device, now_utc_s - self.keep_days * DAY_S)).fetchone()
                self._forget_until(connection, device, oldest[0] if oldest else ALL)
        while _used_bytes(connection) > self.max_bytes and (largest := connection.execute(LARGEST).fetchone()):
            first, final = connection.execute(ENDS, largest).fetchone()
            self._forget_until(connection, largest[0], ALL if final is None else first + (final - first) // 16 + 1)

    def _forget_until(self, connection: sqlite3.Connection, device: int, until: int) -> None:
        if connection.execute(ENDS, (device,)).fetchone()[0] == until:
            return
        for statement in FORGET:
            connection.execute(statement, {"device": device, "until": until, "overhead": OVERHEAD_BYTES})
        self._links = {
            name: entry for name, entry in self._links.items() if entry[0] != device or entry[1].seq >= until
        }

    def _set_aside(self) -> Path:
        unused = unused_name(self.path)
        with explain_disk_errors(self.folder):
            self.path.replace(unused)
            for suffix in ("-wal", "-shm"):
                self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
            drop_oldest(self.folder.glob(f"{FILE}.corrupt-*"), keep=1)  # it may be large
        return unused


def _used_bytes(connection: sqlite3.Connection) -> int:
    pages, free, size = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in PRAGMAS)
    return int((pages - free) * size)
