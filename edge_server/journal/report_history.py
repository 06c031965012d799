"""Writing the site's history of reports: it outlives runs, stays bounded, and never stops one."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from edge_server.journal import report_rows
from edge_server.journal.disk import sql_explained
from edge_server.journal.kept import DEVICE, FILE, SCHEMA, Kept, Link, last
from shared.errors import CorruptFile
from shared.runtime.durable import aside, drop_oldest, explained

log = logging.getLogger(__name__)

FULL_EVERY = 60
"""Rows from one full row to the next: what is read in vain to learn what a figure was."""

SWEEP_S, DAY_S = 3600.0, 86_400.0
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


@dataclass
class Readings:
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
    _swept_utc_s: float = 0.0
    _links: dict[str, tuple[int, Link, int]] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / FILE

    def write(self, batch: Sequence[Kept]) -> None:
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

    def _write(self, batch: Sequence[Kept]) -> None:
        with explained(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        with sql_explained(self.path), self._opened() as connection:
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
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _add(self, connection: sqlite3.Connection, kept: Kept) -> None:
        """Add a report unless it is the one that came last: a retained one is heard again after every restart."""
        report = kept.report
        device, link, since_full = self._known(connection, report.device)
        form, row = report_rows.split(report)
        if link and (link.form.instance, link.at) == (form.instance, report.at):
            return
        form_id = self._form(connection, device, form) if link is None or link.form != form else link.form_id
        is_full = link is None or link.form_id != form_id or since_full >= FULL_EVERY
        body = report_rows.packed(row if link is None or is_full else report_rows.changes(link.row, row))
        seq = link.seq + 1 if link else 1
        connection.execute(INSERT, (device, seq, kept.heard_utc_s, report.at, form_id, is_full, body))
        connection.execute(SPEND, (len(body) + OVERHEAD_BYTES, device))
        after = Link(seq, kept.heard_utc_s, report.at, form_id, form, row)
        self._links[report.device] = device, after, 1 if is_full else since_full + 1

    def _known(self, connection: sqlite3.Connection, name: str) -> tuple[int, Link | None, int]:
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
        return found[0], last(connection, found[0]), FULL_EVERY

    def _form(self, connection: sqlite3.Connection, device: int, form: report_rows.Form) -> int:
        body = report_rows.packed(form)
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
        unused = aside(self.path)
        with explained(self.folder):
            self.path.replace(unused)
            for suffix in ("-wal", "-shm"):
                self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
            drop_oldest(self.folder.glob(f"{FILE}.corrupt-*"), keep=1)  # it may be large
        return unused


def _used_bytes(connection: sqlite3.Connection) -> int:
    pages, free, size = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in PRAGMAS)
    return int((pages - free) * size)
