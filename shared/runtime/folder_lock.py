"""One process at a time in a folder."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.errors import ConfigError


@contextmanager
def hold_lock(folder: Path) -> Iterator[None]:
    """Hold a folder's lock while the block lasts; it falls with the process, however that ends.

    Raises:
        ConfigError: Another process holds it, or another user made it.
    """
    try:
        file = (folder / "lock").open("a")
    except PermissionError as error:
        raise ConfigError(f"{error}; give what lies in {folder} to this user, or name another folder") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{folder} is in use by another process; end that one, or name another folder") from None
        yield
