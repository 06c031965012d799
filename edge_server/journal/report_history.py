"""History of reports of a site in SQLite: bounded in days and bytes, outlives runs, read while the server writes it."""

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
"""Rows from one full row to the next: what is read in vain to learn what a figure was."""

OVERHEAD_BYTES = 48
"""What a row takes beside its body."""

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
class KeptReport:
    """A report of the history.

    Attributes:
        heard_utc_s: Calendar seconds at which the server heard it, by the server's clock.
        report: What was kept of it.
    """

    heard_utc_s: float
    report: Report


@dataclass(frozen=True)
class HistoryRow:
    """A row of a device's history, full again: what the next row's changes refer to."""

    seq: int
    heard_utc_s: float
    at: float
    form_id: int
    form: Form
    row: ReportRow


def iterate_rows(connection: sqlite3.Connection, device: int, first: int) -> Iterator[HistoryRow]:
    """Yield a device's history from a row on; before the first full row, only with the figures that changed.

    Args:
        device: Its number there.
        first: Number of the first row.

    Raises:
        CorruptFile: It is not as it was written.
    """
    form_id, form, row = -1, Form("", "", (), {}, {}), ReportRow({})
    for seq, heard_utc_s, at, number, is_full, body in connection.execute(CHAIN, (device, first)):
        if not isinstance(at, float) or not math.isfinite(at):
            raise CorruptFile(f"a kept report is not as it was written: its time is {at}")
        if number != form_id:
            found = connection.execute(FORM_BY_ID, (number,)).fetchone()
            form_id, form = number, report_rows.decode_form(found[0] if found else b"")  # its first row is full
        changed = report_rows.decode_row(body)
        row = changed if is_full else report_rows.apply_changes(row, changed)
        yield HistoryRow(seq, heard_utc_s, at, form_id, form, row)


def last_row(connection: sqlite3.Connection, device: int) -> HistoryRow | None:
    """Return the last row of a device, None where there is none. Raises CorruptFile as `chain`."""
    first = connection.execute(LAST_FULL, (device,)).fetchone()[0] or 0
    return next(iter(deque(iterate_rows(connection, device, first), maxlen=1)), None)


def latest_reports(path: Path) -> dict[str, KeptReport]:
    """Return the last report of every device.

    Raises:
        ConfigError: There is no history.
        CorruptFile: It cannot be read.
    """

    def read(connection: sqlite3.Connection) -> dict[str, KeptReport]:
        found = {name: last_row(connection, device) for device, name in connection.execute(DEVICES).fetchall()}
        return {
            name: KeptReport(link.heard_utc_s, report_rows.join_report(name, link.at, link.form, link.row))
            for name, link in found.items()
            if link
        }

    return _ask(path, read)


def reading_history(path: Path, device: str, name: str, since_utc_s: float = 0.0) -> list[tuple[float, Reading]]:
    """Return a figure of a device over time, with the calendar seconds at which the server heard each.

    Args:
        since_utc_s: Calendar seconds from which on.

    Raises:
        ConfigError: There is no history.
        CorruptFile: It cannot be read.
    """

    def read(connection: sqlite3.Connection) -> list[tuple[float, Reading]]:
        number = (connection.execute(DEVICE, (device,)).fetchone() or [-1])[0]
        first = connection.execute(FULL_BEFORE, (number, since_utc_s)).fetchone()[0] or 0
        links = (link for link in iterate_rows(connection, number, first) if link.heard_utc_s >= since_utc_s)
        found = ((link.heard_utc_s, report_rows.row_reading(name, link.at, link.form, link.row)) for link in links)
        return [(heard_utc_s, reading) for heard_utc_s, reading in found if reading]

    return _ask(path, read)


def forget_history(path: Path, device: str) -> int:
    """Remove a device from the history, which a server may write meanwhile; return how many reports these were.

    Raises:
        CorruptFile: The history cannot be read.
        Unwritable: It cannot be written.
    """
    opened = closing(sqlite3.connect(path, isolation_level=None))
    with translate_sql_errors(path), explain_disk_errors(path.parent), opened as connection:
        _require_tables(connection, path)
        connection.execute("BEGIN IMMEDIATE")
        found = connection.execute(DEVICE, (device,)).fetchone()
        if not found:
            return 0
        (count,) = connection.execute("SELECT count(*) FROM reports WHERE device = ?", found).fetchone()
        for statement in FORGET:
            connection.execute(statement, {"device": found[0], "until": ALL, "overhead": OVERHEAD_BYTES})
        connection.execute("COMMIT")
        return int(count)


def _require_tables(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a file whose tables are views, which may go on for ever.

    Raises:
        CorruptFile: One is.
    """
    for name, kind, sql in connection.execute(TABLES):
        if kind != "table" or not sql.upper().startswith("CREATE TABLE"):
            raise CorruptFile(f"{path}: {name} is no table of ours but a {kind}")


def _ask(path: Path, read: Callable[[sqlite3.Connection], T]) -> T:
    if not path.is_file():
        raise ConfigError(f"{path}: no server has kept a history there; name its data_dir")
    attempts = 0
    while True:
        try:
            with translate_sql_errors(path), closing(sqlite3.connect(read_only_uri(path), uri=True)) as connection:
                _require_tables(connection, path)
                return read(connection)
        except sqlite3.Error as error:
            # Between a writer's last words and its end, its shared memory file goes away under a reader's feet.
            attempts += 1
            if attempts == ATTEMPTS or error.sqlite_errorcode != sqlite3.SQLITE_CANTOPEN:
                raise CorruptFile(f"{path}: {error}") from error


SWEEP_S, DAY_S = 3600.0, 86_400.0


@dataclass
class ReportHistory:
    """The history's one writer in this process; may be used from several threads.

    Attributes:
        folder: Where the file lies, or will lie.
        keep_days: Reports older than that are forgotten.
        max_bytes: Of the file. Beyond it the device that takes most of it loses its oldest reports first, so that one
            that says much leaves the others their share.
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
        """The file."""
        return self.folder / FILE

    def write(self, batch: Sequence[KeptReport]) -> None:
        """Add reports, all or none; a damaged history is set aside, and a new one begun with them.

        Raises:
            Unwritable: The disk takes nothing more, and the reports are dropped.
        """
        with self._lock:
            try:
                self._write(batch)
            except CorruptFile as error:
                self.close()
                unused = self._set_aside()
                log.error("%s; set aside as %s, a new history begins", error, unused.name)  # noqa: TRY400 - no fault
                self._write(batch)

    def close(self) -> None:
        """Close the file; the next write opens it again."""
        with self._lock:
            if self._connection:
                self._connection.close()
            self._connection, self._links = None, {}

    def _write(self, batch: Sequence[KeptReport]) -> None:
        with explain_disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        self._notice_deleted()
        with translate_sql_errors(self.path), self._opened() as connection:
            connection.execute("BEGIN IMMEDIATE")
            for kept in batch:
                self._add(connection, kept)
            self._forget(connection, max((kept.heard_utc_s for kept in batch), default=0.0))

    def _opened(self) -> sqlite3.Connection:
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
        """Go on in the file that is there; where it was deleted, the open one still has every report."""
        if self._connection is None or (found := file_identity(self.path)) == self._identity:
            return
        partial = self.path.with_name(f"{FILE}.part")
        if found is None:
            with translate_sql_errors(self.path), explain_disk_errors(self.folder):
                partial.unlink(missing_ok=True)
                with closing(sqlite3.connect(partial)) as copy:
                    self._connection.backup(copy)
        self.close()
        if found is None:
            with explain_disk_errors(self.folder):
                for suffix in ("-wal", "-shm"):
                    self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
                partial.replace(self.path)
            log.warning("%s was deleted: written anew, with all its reports", self.path)

    def _add(self, connection: sqlite3.Connection, kept: KeptReport) -> None:
        """Add a report unless it is the one that came last: a retained one is heard again after every restart."""
        report = kept.report
        device, link, since_full = self._known(connection, report.device)
        form, row = report_rows.split_report(report)
        if link and (link.form.instance, link.at) == (form.instance, report.at):
            return
        form_id = self._form(connection, device, form) if link is None or link.form != form else link.form_id
        is_full = link is None or link.form_id != form_id or since_full >= FULL_EVERY
        body = report_rows.encode_part(row if link is None or is_full else report_rows.row_changes(link.row, row))
        seq = link.seq + 1 if link else 1
        connection.execute(INSERT, (device, seq, kept.heard_utc_s, report.at, form_id, is_full, body))
        connection.execute(SPEND, (len(body) + OVERHEAD_BYTES, device))
        after = HistoryRow(seq, kept.heard_utc_s, report.at, form_id, form, row)
        self._links[report.device] = device, after, 1 if is_full else since_full + 1

    def _known(self, connection: sqlite3.Connection, name: str) -> tuple[int, HistoryRow | None, int]:
        """Return a device's number, its last row and how many rows ago one was full.

        What is remembered holds if that row is the last in the file: another process may have written since, or what
        was written may have been rolled back.
        """
        if name in self._links:
            device, link, since_full = self._links[name]
            if connection.execute(NEW_SEQ, (device,)).fetchone()[0] == link.seq:
                return device, link, since_full
        found = connection.execute(DEVICE, (name,)).fetchone()
        if not found:
            return connection.execute(NEW_DEVICE, (name,)).lastrowid or 0, None, 0
        return found[0], last_row(connection, found[0]), FULL_EVERY

    def _form(self, connection: sqlite3.Connection, device: int, form: report_rows.Form) -> int:
        body = report_rows.encode_part(form)
        digest = xxhash.xxh3_64_intdigest(body) >> 1
        if found := connection.execute(FORM, (device, digest)).fetchone():
            return int(found[0])
        connection.execute(SPEND, (len(body) + OVERHEAD_BYTES, device))
        return connection.execute(NEW_FORM, (device, digest, body)).lastrowid or 0

    def _forget(self, connection: sqlite3.Connection, now_utc_s: float) -> None:
        if abs(now_utc_s - self._swept_utc_s) >= SWEEP_S:
            self._swept_utc_s = now_utc_s
            for (device,) in connection.execute("SELECT id FROM devices").fetchall():
                kept = connection.execute(FIRST_SINCE, (device, now_utc_s - self.keep_days * DAY_S)).fetchone()
                self._forget_until(connection, device, kept[0] if kept else ALL)
        while _used_bytes(connection) > self.max_bytes and (largest := connection.execute(LARGEST).fetchone()):
            first, final = connection.execute(ENDS, largest).fetchone()
            self._forget_until(connection, largest[0], ALL if final is None else first + (final - first) // 16 + 1)

    def _forget_until(self, connection: sqlite3.Connection, device: int, until: int) -> None:
        if connection.execute(ENDS, (device,)).fetchone()[0] == until:
            return
        for statement in FORGET:
            connection.execute(statement, {"device": device, "until": until, "overhead": OVERHEAD_BYTES})
        self._links = {name: one for name, one in self._links.items() if one[0] != device or one[1].seq >= until}

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
