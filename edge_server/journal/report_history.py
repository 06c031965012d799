"""Report history of a site: one row per report in SQLite, bounded in days and bytes.

It outlives runs and can be read while the server writes it. A device's reports resemble each other, so each is
compressed against a template, an earlier report of the device: to a tenth of its size.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import zlib
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from edge_server.journal.disk import file_identity, translate_sql_errors
from edge_server.journal.earlier_reports import read_earlier
from edge_server.journal.sqlite import read_database, require_table
from shared.errors import ConfigError, CorruptFile
from shared.protocol.measurements import Reading
from shared.protocol.messages import Report
from shared.protocol.topics import is_name
from shared.runtime.durable import drop_oldest, explain_disk_errors, unused_name

FILE = "readings.sqlite"
MOST_BYTES = 32 << 10
"""Of an encoded report; a hundred readings take 12 KiB. Of larger reports a part is stored."""
SWEEP_S, DAY_S = 3600.0, 86_400.0
ALL = 1 << 62

TABLE = """CREATE TABLE reports (
    device TEXT, seq INTEGER, heard_utc_s REAL, template INTEGER, body BLOB, PRIMARY KEY (device, seq)
) WITHOUT ROWID"""
"""Each device's reports are numbered from 1, its templates from -1 downwards."""
TABLE_SQL = "SELECT CAST(sql AS BLOB) FROM sqlite_master WHERE name = 'reports'"
# A power cut may cost the last reports.
PRAGMAS = "PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL; PRAGMA journal_size_limit = 4194304;"
SCHEMA = PRAGMAS + TABLE.replace("TABLE", "TABLE IF NOT EXISTS", 1)
DEVICES = "SELECT DISTINCT device FROM reports"
ROWS = """SELECT row.heard_utc_s, row.body, base.body, row.template, row.seq FROM reports AS row
    LEFT JOIN reports AS base ON base.device = row.device AND base.seq = row.template WHERE row.seq > 0"""
LAST = f"{ROWS} AND row.device = ? ORDER BY row.seq DESC LIMIT 1"
SINCE = f"{ROWS} AND row.device = ? AND row.heard_utc_s >= ? ORDER BY row.seq"
INSERT = "INSERT INTO reports VALUES (?, ?, ?, ?, ?)"
DELETE = "DELETE FROM reports WHERE device = ? AND seq > 0 AND seq < ?"
DELETE_UNUSED = """DELETE FROM reports WHERE device = ? AND seq < 0
    AND seq NOT IN (SELECT template FROM reports WHERE device = ?)"""
FIRST_SINCE = "SELECT seq FROM reports WHERE device = ? AND seq > 0 AND heard_utc_s >= ? ORDER BY seq LIMIT 1"
SIZES = """SELECT device, min(seq) FILTER (WHERE seq > 0), max(seq) + 1, sum(length(body) + 48)
    FROM reports GROUP BY device"""
USED = """SELECT (page_count - freelist_count) * page_size
    FROM pragma_page_count, pragma_freelist_count, pragma_page_size"""

T = TypeVar("T")
log = logging.getLogger(__name__)


class StoredReport(NamedTuple):
    """The stored part of a report, and the calendar second on the server's clock at which it arrived."""

    heard_utc_s: float
    report: Report


def latest_reports(path: Path) -> dict[str, StoredReport]:
    """Return the last report of every device. Raises ConfigError without a history, CorruptFile if it is damaged."""

    def read(connection: sqlite3.Connection) -> list[StoredReport]:
        devices = connection.execute(DEVICES).fetchall()
        return [_decode(connection.execute(LAST, device).fetchone()) for device in devices]

    return {stored.report.device: stored for stored in _query(path, read)}


def reading_history(path: Path, device: str, name: str, since_utc_s: float = 0.0) -> list[tuple[float, Reading]]:
    """Return a reading over time, with the calendar seconds of its arrival. Raises as `latest_reports`."""

    def read(connection: sqlite3.Connection) -> list[tuple[float, Reading]]:
        reports = map(_decode, connection.execute(SINCE, (device, since_utc_s)))
        return [(heard_utc_s, report.readings[name]) for heard_utc_s, report in reports if name in report.readings]

    return _query(path, read)


def forget_history(path: Path, device: str) -> int:
    """Remove a device from the history; return the number of its reports. Raises CorruptFile, Unwritable."""
    database = closing(sqlite3.connect(path))
    with translate_sql_errors(path), explain_disk_errors(path.parent), database as connection, connection:
        return _forget_until(_check(connection, path), device, ALL)


def _query(path: Path, read: Callable[[sqlite3.Connection], T]) -> T:
    if not path.is_file():
        raise ConfigError(f"{path}: no report history found; give the data_dir of a server")
    if earlier := read_earlier(path):
        with closing(sqlite3.connect(":memory:")) as connection:
            connection.execute(TABLE)
            for stored in earlier:
                _add(connection, StoredReport(*stored))
            return read(connection)
    return read_database(path, lambda connection: read(_check(connection, path)))


def _check(connection: sqlite3.Connection, path: Path) -> sqlite3.Connection:
    require_table(path, connection.execute(TABLE_SQL).fetchone(), TABLE)
    return connection


def _encode(report: Report) -> bytes:
    """Encode a report with the ages of its readings, which compress better than their times, within `MOST_BYTES`."""
    readings = {name: replace(reading, at=report.at - reading.at) for name, reading in report.readings.items()}
    spent = report.spent if report.spent and is_name(report.spent.run) else None
    report = replace(report, readings=readings, spent=spent, earlier=[])
    while len(data := msgspec.msgpack.encode(report)) > MOST_BYTES:
        entries = {name: list(getattr(report, name).items()) for name in ("readings", "absent", "facts")}
        halves = {name: dict(items[: len(items) // 2]) for name, items in entries.items()}
        report = replace(report, board="", spent=None, **halves)
    return data


def _decode(row: Sequence[Any]) -> StoredReport:
    try:
        data = zlib.decompressobj(zdict=row[2]).decompress(row[1], MOST_BYTES)
        report, heard_utc_s = msgspec.msgpack.decode(data, type=Report), float(row[0])
    except (zlib.error, msgspec.DecodeError, RecursionError, TypeError, ValueError) as error:
        raise CorruptFile(f"a stored report is damaged: {error}") from error
    readings = {name: replace(reading, at=report.at - reading.at) for name, reading in report.readings.items()}
    return StoredReport(heard_utc_s, replace(report, readings=readings))


def _compress(data: bytes, template: bytes) -> bytes:
    deflater = zlib.compressobj(zdict=template)
    return deflater.compress(data) + deflater.flush()


def _add(connection: sqlite3.Connection, stored: StoredReport) -> None:
    """Add a report unless it is the device's last one: retained messages arrive again after every restart."""
    device, data = stored.report.device, _encode(stored.report)
    template, number, seq = b"", 0, 0
    if row := connection.execute(LAST, (device,)).fetchone():
        last, (template, number, seq) = _decode(row).report, row[2:]
        if (last.instance, last.at) == (stored.report.instance, stored.report.at):
            return
    body = _compress(data, template)
    if not template or len(body) > len(data) // 4:
        template, number = data, number - 1
        connection.execute(INSERT, (device, number, 0.0, 0, template))
        body = _compress(data, template)
    connection.execute(INSERT, (device, seq + 1, stored.heard_utc_s, number, body))


def _forget_until(connection: sqlite3.Connection, device: str, until: int) -> int:
    removed = connection.execute(DELETE, (device, until)).rowcount
    connection.execute(DELETE_UNUSED, (device, device))
    return removed


@dataclass
class ReportHistory:
    """The only writer of the history in this process; may be used from several threads.

    Beyond `max_bytes` of the file, the device that uses most loses its oldest reports first, so that a talkative device
    does not displace the others.
    """

    folder: Path
    keep_days: float
    max_bytes: int
    _connection: sqlite3.Connection | None = None
    _identity: tuple[int, int] | None = None
    _swept_utc_s: float = 0.0
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self.folder / FILE

    def write(self, batch: Sequence[StoredReport]) -> None:
        """Add reports, all or none; a damaged history is set aside. Raises Unwritable, and drops the reports."""
        with self._lock, explain_disk_errors(self.folder):
            try:
                self._write(batch)
            except CorruptFile as error:
                self.close()
                last = [StoredReport(*stored) for stored in read_earlier(self.path)]
                unused = self.path.replace(unused_name(self.path))
                drop_oldest(self.folder.glob(f"{FILE}.corrupt-*"), keep=1)  # it may be large
                log.error("%s; set aside as %s, starting a new history", error, unused.name)  # noqa: TRY400 - no fault
                self._write([*last, *batch])

    def close(self) -> None:
        """Close the file; the next write opens it again."""
        with self._lock:
            if self._connection:
                self._connection.close()
            self._connection = None

    def _write(self, batch: Sequence[StoredReport]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with translate_sql_errors(self.path), self._connect() as connection:
            connection.execute("BEGIN IMMEDIATE")
            for stored in batch:
                _add(connection, stored)
            self._forget(connection, max((stored.heard_utc_s for stored in batch), default=0.0))

    def _connect(self) -> sqlite3.Connection:
        if self._connection and file_identity(self.path) != self._identity:
            log.warning("%s was deleted or replaced; the history continues in the new file", self.path)
            self.close()
        if self._connection is None:
            self.path.touch()
            self._connection = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None)
            self._identity = file_identity(self.path)
        self._connection.executescript(SCHEMA)
        return _check(self._connection, self.path)

    def _forget(self, connection: sqlite3.Connection, now_utc_s: float) -> None:
        used = connection.execute(USED).fetchone()[0]
        if used <= self.max_bytes and abs(now_utc_s - self._swept_utc_s) < SWEEP_S:
            return
        self._swept_utc_s, share, sizes = now_utc_s, float(used), connection.execute(SIZES).fetchall()
        room = sum(size for *_, size in sizes) * min(1.0, self.max_bytes * 15 / 16 / used)
        while sum(min(size, share) for *_, size in sizes) > room:
            share *= 15 / 16
        for device, first, end, size in sizes:
            since = connection.execute(FIRST_SINCE, (device, now_utc_s - self.keep_days * DAY_S)).fetchone()
            excess = int((end - first) * max(0.0, 1 - share / size))
            _forget_until(connection, device, max(since[0] if since else end, first + excess))
