"""Exclusive folder lock, by flock on a file and on the folder."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shared.errors import ConfigError

log = logging.getLogger(__name__)

FOLDER_LOCK = "lock"
PRIVATE, OTHERS = 0o600, 0o077
LOOK_S = 1.0
"""Interval of checks that the lock file still exists."""


def _open_private(path: str, flags: int) -> int:
    """Open a file that other users may not even open to read: opening is enough to lock it."""
    descriptor = os.open(path, flags, PRIVATE)
    with suppress(OSError):  # another user's file, in which we may write
        os.fchmod(descriptor, PRIVATE)  # earlier versions created it readable
    return descriptor


class FolderLock:
    """Exclusive lock of this process on a folder.

    A deleted lock file protects nothing; then the lock on the folder itself does, until the file is created again.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._held = folder, dict[tuple[int, int], int]()

    def take(self) -> None:
        """Acquire the lock.

        Raises:
            ConfigError: Another process holds it, or the file belongs to another user.
        """
        try:
            self._lock()
        except PermissionError as error:
            hint = f"give the files in {self._folder} to this user, or name another folder"
            raise ConfigError(f"{error}; {hint}") from error
        except BlockingIOError:
            raise ConfigError(self._in_use()) from None

    def renew(self) -> None:
        """Lock again if the lock file was deleted, perhaps with the folder.

        Raises:
            ConfigError: Another process holds the lock now.
            OSError: The file cannot be created.
        """
        file = self._folder / FOLDER_LOCK
        try:
            status = file.stat()
            if (status.st_dev, status.st_ino) in self._held:
                return
        except FileNotFoundError:
            pass
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock()
        except BlockingIOError:
            raise ConfigError(f"{file} was deleted while this process held it, and {self._in_use()}") from None
        log.warning("%s was deleted: created again, and the folder is still locked by this process", file)

    def _in_use(self) -> str:
        return f"{self._folder} is in use by another process; end that one, or name another folder"

    def _lock(self) -> None:
        """Lock the file and the folder unless they are locked already."""
        self._lock_descriptor(_open_private(str(self._folder / FOLDER_LOCK), os.O_RDWR | os.O_CREAT | os.O_APPEND))
        itself = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        if os.fstat(itself).st_mode & OTHERS:
            os.close(itself)  # any user who can open it could lock us out
        else:
            self._lock_descriptor(itself)

    def _lock_descriptor(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) in self._held:
            os.close(descriptor)
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if isinstance(error, BlockingIOError) or not stat.S_ISDIR(status.st_mode):
                os.close(descriptor)  # some file systems can lock only files
                raise
        self._held[status.st_dev, status.st_ino] = descriptor

    def release(self) -> None:
        """Release the lock."""
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()


@contextmanager
def hold_lock(folder: Path) -> Iterator[FolderLock]:
    """Hold a folder's lock while the block lasts; the system releases it when the process ends.

    Raises:
        ConfigError: Another process holds it, or the file belongs to another user.
    """
    lock = FolderLock(folder)
    try:
        lock.take()
        yield lock
    finally:
        lock.release()


def is_held(folder: Path, *, unknown: bool = False) -> bool:
    """Check whether a process holds a folder's lock; return `unknown` if this user has no right to check."""
    try:
        with (folder / FOLDER_LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return unknown
    return False


async def keep_lock(lock: FolderLock) -> None:
    """Maintain a lock until cancelled, even if its file is deleted.

    Raises:
        ConfigError: Another process holds the folder now.
    """
    while True:
        await asyncio.sleep(LOOK_S)
        with suppress(OSError):  # disk errors are reported by those who write there
            lock.renew()
