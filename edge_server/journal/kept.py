"""Reading the site's history of reports, also while the server writes it."""

from __future__ import annotations

import math
import sqlite3
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from edge_server.journal import report_rows
from edge_server.journal.disk import sql_explained, to_read
from edge_server.journal.report_rows import Form, Row
from shared.errors import ConfigError, CorruptFile
from shared.protocol.measurements import Reading
from shared.protocol.messages import Report

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
DEVICE = "SELECT id FROM devices WHERE name = ?"
DEVICES = "SELECT id, name FROM devices ORDER BY name"
LAST_FULL = "SELECT max(seq) FROM reports WHERE device = ? AND is_full"
FULL_BEFORE = "SELECT max(seq) FROM reports WHERE device = ? AND is_full AND heard_utc_s <= ?"
CHAIN = "SELECT seq, heard_utc_s, at, form, is_full, body FROM reports WHERE device = ? AND seq >= ? ORDER BY seq"
FORM = "SELECT body FROM forms WHERE id = ?"


@dataclass(frozen=True)
class Kept:
    """A report of the history.

    Attributes:
        heard_utc_s: Calendar seconds at which the server heard it, by the server's clock.
        report: What was kept of it.
    """

    heard_utc_s: float
    report: Report


@dataclass(frozen=True)
class Link:
    """A row of a device's history, full again: what the next row is told against."""

    seq: int
    heard_utc_s: float
    at: float
    form_id: int
    form: Form
    row: Row


def chain(connection: sqlite3.Connection, device: int, first: int) -> Iterator[Link]:
    """Yield a device's history from a row on; before the first full row, only with the figures that changed.

    Raises:
        CorruptFile: It is not as it was written.
    """
    form_id, form, row = -1, Form("", "", (), {}, {}), Row({})
    for seq, heard_utc_s, at, number, is_full, body in connection.execute(CHAIN, (device, first)):
        if not isinstance(at, float) or not math.isfinite(at):
            raise CorruptFile(f"a kept report is not as it was written: its time is {at}")
        if number != form_id:
            found = connection.execute(FORM, (number,)).fetchone()
            form_id, form = number, report_rows.form_of(found[0] if found else b"")  # its first row is full
        changed = report_rows.row_of(body)
        row = changed if is_full else report_rows.after(row, changed)
        yield Link(seq, heard_utc_s, at, form_id, form, row)


def last(connection: sqlite3.Connection, device: int) -> Link | None:
    """Return the last row of a device, None where there is none. Raises CorruptFile as `chain`."""
    first = connection.execute(LAST_FULL, (device,)).fetchone()[0] or 0
    return next(iter(deque(chain(connection, device, first), maxlen=1)), None)


def latest(path: Path) -> dict[str, Kept]:
    """Return the last report of every device.

    Raises:
        ConfigError: There is no history.
        CorruptFile: It cannot be read.
    """

    def read(connection: sqlite3.Connection) -> dict[str, Kept]:
        found = {name: last(connection, device) for device, name in connection.execute(DEVICES).fetchall()}
        return {
            name: Kept(link.heard_utc_s, report_rows.join(name, link.at, link.form, link.row))
            for name, link in found.items()
            if link
        }

    return _ask(path, read)


def history(path: Path, device: str, name: str, since_utc_s: float = 0.0) -> list[tuple[float, Reading]]:
    """Return a figure of a device over time, with the calendar seconds at which the server heard each.

    Raises:
        ConfigError: There is no history.
        CorruptFile: It cannot be read.
    """

    def read(connection: sqlite3.Connection) -> list[tuple[float, Reading]]:
        number = (connection.execute(DEVICE, (device,)).fetchone() or [-1])[0]
        first = connection.execute(FULL_BEFORE, (number, since_utc_s)).fetchone()[0] or 0
        links = (link for link in chain(connection, number, first) if link.heard_utc_s >= since_utc_s)
        found = ((link.heard_utc_s, report_rows.reading(name, link.at, link.form, link.row)) for link in links)
        return [(heard_utc_s, reading) for heard_utc_s, reading in found if reading]

    return _ask(path, read)


def _ask(path: Path, read: Callable[[sqlite3.Connection], T]) -> T:
    if not path.is_file():
        raise ConfigError(f"{path}: no server has kept a history there; name its data_dir")
    attempts = 0
    while True:
        try:
            with sql_explained(path), closing(sqlite3.connect(to_read(path), uri=True)) as connection:
                return read(connection)
        except sqlite3.Error as error:
            # Between a writer's last words and its end, its shared memory file goes away under a reader's feet.
            attempts += 1
            if attempts == ATTEMPTS or error.sqlite_errorcode != sqlite3.SQLITE_CANTOPEN:
                raise CorruptFile(f"{path}: {error}") from error
