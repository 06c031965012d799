"""Hold a folder, one process at a time: by a file in it, and by itself where nobody else may open it."""

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
"""Between two looks at whether the file is still there."""


def _open_private(path: str, flags: int) -> int:
    """Open a file that others may not even open to read: that is enough to hold its lock."""
    descriptor = os.open(path, flags, PRIVATE)
    with suppress(OSError):  # of another user, who lets us write in it
        os.fchmod(descriptor, PRIVATE)  # of versions before
    return descriptor


class FolderLock:
    """A folder that is this process's.

    A file that was deleted keeps nobody out; the folder itself does then, until the file is made anew.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._held = folder, dict[tuple[int, int], int]()

    def take(self) -> None:
        """Take it.

        Raises:
            ConfigError: Another process holds it, or another user made it.
        """
        try:
            self._lock()
        except PermissionError as error:
            hint = f"give what lies in {self._folder} to this user, or name another folder"
            raise ConfigError(f"{error}; {hint}") from error
        except BlockingIOError:
            raise ConfigError(self._in_use()) from None

    def renew(self) -> None:
        """Take it anew where its file was deleted, and the folder too perhaps.

        Raises:
            ConfigError: Another process holds it by now.
            OSError: The file cannot be made.
        """
        file = self._folder / FOLDER_LOCK
        try:
            found = file.stat()
            if (found.st_dev, found.st_ino) in self._held:
                return
        except FileNotFoundError:
            pass
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock()
        except BlockingIOError:
            raise ConfigError(f"{file} was deleted while this process held it, and {self._in_use()}") from None
        log.warning("%s was deleted: it is made anew, and this process holds the folder still", file)

    def _in_use(self) -> str:
        return f"{self._folder} is in use by another process; end that one, or name another folder"

    def _lock(self) -> None:
        """Lock what is not held yet."""
        self._hold(_open_private(str(self._folder / FOLDER_LOCK), os.O_RDWR | os.O_CREAT | os.O_APPEND))
        itself = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        if os.fstat(itself).st_mode & OTHERS:
            os.close(itself)  # whoever may open it could keep us out
        else:
            self._hold(itself)

    def _hold(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        if (found.st_dev, found.st_ino) in self._held:
            os.close(descriptor)
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if isinstance(error, BlockingIOError) or not stat.S_ISDIR(found.st_mode):
                os.close(descriptor)  # some file systems lock files alone
                raise
        self._held[found.st_dev, found.st_ino] = descriptor

    def release(self) -> None:
        """Let others have it."""
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()


@contextmanager
def hold_lock(folder: Path) -> Iterator[FolderLock]:
    """Hold a folder's lock while the block lasts; it falls with the process, however that ends.

    Raises:
        ConfigError: Another process holds it, or another user made it.
    """
    lock = FolderLock(folder)
    try:
        lock.take()
        yield lock
    finally:
        lock.release()


def is_held(folder: Path, *, unknown: bool = False) -> bool:
    """Tell whether a process holds a folder's lock; `unknown` where this user may not know."""
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
    """Keep a lock until cancelled, whatever becomes of its file.

    Raises:
        ConfigError: Another process holds the folder by now.
    """
    while True:
        await asyncio.sleep(LOOK_S)
        with suppress(OSError):  # a disk that refuses is told of by who writes there
            lock.renew()
