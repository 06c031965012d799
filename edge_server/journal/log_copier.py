"""Checkpoint of the SQLite write-ahead log after each round, in a background thread."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

PAUSE_S = 0.1
"""Seconds until a copy; short rounds share one, which takes two disk waits."""


class LogCopier:
    """Completes deferred writes and copies the log, in a thread.

    Args:
        commit: Writes records that were deferred until the next write.

    Attributes:
        connection: A second connection to the journal; exchange it only while holding `copying`.
    """

    def __init__(self, commit: Callable[[], None]) -> None:
        self._commit = commit
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")
        self._last: Future[None] | None = None
        self._is_due, self._hurry = False, threading.Event()
        self.copying = threading.Lock()
        self.connection: sqlite3.Connection | None = None

    def schedule(self) -> None:
        """Copy the log soon, with all that was written or deferred by now."""
        if not self._is_due:
            self._is_due = True
            self._last = self._thread.submit(self._copy_soon)

    def _copy_soon(self) -> None:
        self._hurry.wait(PAUSE_S)
        self._is_due = False  # what comes from here on needs another copy
        self._commit()
        with self.copying, suppress(sqlite3.Error):  # records are safe in the log; a full disk shows at the next one
            if self.connection:
                self.connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def settle(self) -> None:
        """Wait until all that was scheduled is copied."""
        self._hurry.set()
        if self._last:
            self._last.result()
        self._hurry.clear()

    def close(self) -> None:
        """End the thread after a scheduled copy."""
        self._hurry.set()
        self._thread.shutdown()
