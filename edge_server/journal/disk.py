"""SQLite and disk errors: translation and retry while a disk is full.

A run waits for a full disk instead of failing: an unattended gateway continues once somebody has made room.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar
from urllib.parse import quote

from shared.errors import CorruptFile, Unwritable
from shared.runtime.durable import disk_error
from shared.runtime.executor import Worker

_DISK: Mapping[int, int] = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_IOERR: errno.EIO,
    sqlite3.SQLITE_READONLY: errno.EROFS,
}
_CORRUPT = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)  # the last: a damaged table

P = ParamSpec("P")
R = TypeVar("R")
log = logging.getLogger(__name__)
RETRY_S = 3.0


def read_only_uri(path: Path) -> str:
    """Return the URI that opens a database read-only, even while another user's process writes it."""
    is_idle = not path.with_name(f"{path.name}-wal").exists()
    # Where nobody can write, SQLite cannot make its shared memory file and must be told that it needs none; a writer
    # has made one, and what it wrote last lies beside the database.
    mode = "immutable=1" if is_idle and not os.access(path.parent, os.W_OK, effective_ids=True) else "mode=ro"
    return f"file:{quote(str(path))}?{mode}"


def file_identity(path: Path) -> tuple[int, int] | None:
    """Return the device and inode of a file; None if it does not exist."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_dev, stat.st_ino


@contextmanager
def translate_sql_errors(path: Path) -> Iterator[None]:
    """Translate SQLite errors.

    Raises:
        Unwritable: The disk is full, failing or read-only.
        CorruptFile: The database cannot be read.
    """
    try:
        yield
    except UnicodeDecodeError as error:  # a damaged name of a table
        raise CorruptFile(f"{path}: {error}") from error
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_CANTOPEN and not os.access(path.parent, os.W_OK):
            code = sqlite3.SQLITE_READONLY
        elif code == sqlite3.SQLITE_READONLY and os.access(path, os.W_OK):
            code = sqlite3.SQLITE_CORRUPT  # the header claims a later version
        if code in _DISK:
            raise disk_error(path, _DISK[code]) from error
        if code in _CORRUPT:
            raise CorruptFile(f"{path}: {error}") from error
        raise


async def retry_write(
    worker: Worker, retry_s: float | None, write: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
) -> R:
    """Run a write, repeated every `retry_s` while the disk refuses; None to give up at once.

    Raises:
        Unwritable: The disk refuses, and `retry_s` is None.
    """
    refused = False
    while True:
        try:
            result = await worker(write, *args, **kwargs)
        except Unwritable as error:
            if retry_s is None:
                raise
            if not refused:
                log.error("%s; retrying every %.0f s", error, retry_s)  # noqa: TRY400 - not a fault
            refused = True
            await asyncio.sleep(retry_s)
        else:
            if refused:
                log.info("writing to the disk works again")
            return result
