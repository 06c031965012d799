"""The store on disk: a SQLite journal in WAL mode, checkpoints and accepted updates beside it, in one folder a run."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import msgspec

from edge_server.store import checkpoints
from edge_server.store.base import AnyRecord
from shared.errors import CorruptFile
from shared.tree import State

JOURNAL = "journal.sqlite"
ATTEMPTS = 50

_encoder = msgspec.json.Encoder(order="deterministic")
_decoder: msgspec.json.Decoder[AnyRecord] = msgspec.json.Decoder(AnyRecord)


class SqliteStore:
    """One run's folder. May be used from several threads, one call at a time."""

    def __init__(self, folder: Path, *, durable: bool = True) -> None:
        """Open or create a run's folder.

        Raises:
            CorruptFile: The journal there is torn.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._lock = threading.Lock()
        self._connection = sqlite3.connect(folder / JOURNAL, check_same_thread=False, isolation_level=None)
        try:
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'OFF'}")
            self._connection.execute("CREATE TABLE IF NOT EXISTS records (seq INTEGER PRIMARY KEY, body TEXT NOT NULL)")
        except sqlite3.DatabaseError as error:
            self._connection.close()
            raise CorruptFile(f"{folder / JOURNAL}: {error}") from error

    def append(self, record: AnyRecord) -> None:
        body = _encoder.encode(record).decode()
        with self._lock:
            self._connection.execute("INSERT INTO records (body) VALUES (?)", (body,))

    def records(self) -> list[AnyRecord]:
        with self._lock:
            rows = self._connection.execute("SELECT body FROM records ORDER BY seq").fetchall()
        return _parse(self.folder, rows)

    def save(self, number: int, state: State) -> None:
        checkpoints.save(self.folder / "checkpoints", number, state)

    def load(self, number: int) -> State:
        return checkpoints.load(self.folder / "checkpoints", number)

    def export(self) -> Path:
        """Write the journal as JSON lines beside the database; return the path."""
        path = self.folder / "journal.jsonl"
        path.write_bytes(b"".join(_encoder.encode(record) + b"\n" for record in self.records()))
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
            return _parse(folder, _rows(folder, after))
        except sqlite3.DatabaseError as error:
            # Between a writer's last words and its end, its shared memory file goes away under a reader's feet.
            if attempt == ATTEMPTS or error.sqlite_errorcode != sqlite3.SQLITE_CANTOPEN:
                raise CorruptFile(f"{folder / JOURNAL}: {error}") from error
    return []


def _rows(folder: Path, after: int) -> list[tuple[str]]:
    with closing(sqlite3.connect(f"file:{folder / JOURNAL}?mode=ro", uri=True)) as connection:
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'records'").fetchone():
            return []  # the writer has made the file and not yet the table
        return connection.execute("SELECT body FROM records WHERE seq > ? ORDER BY seq", (after,)).fetchall()


def _parse(folder: Path, rows: list[tuple[str]]) -> list[AnyRecord]:
    try:
        return [_decoder.decode(body) for (body,) in rows]
    except msgspec.DecodeError as error:
        raise CorruptFile(f"{folder / JOURNAL}: {error}") from error
