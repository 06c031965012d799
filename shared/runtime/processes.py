"""A process and its children: its log, the lock of its folder, and the end of those it started.

A log is one line an event on standard error: level, logger, key=value; under systemd the journal adds the time.
Children are ended by SIGTERM or by what they were told, and by SIGKILL where that does not help in time.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shared.errors import ConfigError
from shared.runtime.logs import LimitRepeats

EXIT_PATIENCE_S = 5.0
PRIVATE = 0o600


async def terminate(process: Process, patience_s: float = EXIT_PATIENCE_S) -> None:
    """End a child process that was started here: politely, then not; return when it is gone."""
    if process.returncode is None:
        process.terminate()
        await wait_or_kill(process, patience_s)


async def wait_or_kill(process: Process, patience_s: float = EXIT_PATIENCE_S) -> None:
    """Wait for the end of a process that was told to end, for instance by closing its input; kill it if it does not."""
    try:
        async with asyncio.timeout(patience_s):
            await process.wait()
    except TimeoutError:
        await kill(process)


async def kill(process: Process) -> None:
    """End a process as a power cut does; return when it is gone."""
    if process.returncode is None:
        process.kill()
        await process.wait()


def configure(level: str, more: int = 0) -> None:
    """Set up logging for a process.

    Args:
        level: Name of a level: debug, info, warning, error.
        more: By how many levels more is logged.
    """
    if (usual := logging.getLevelNamesMapping().get(level.upper())) is None:
        raise ValueError(f"no level {level.upper()!r}: use debug, info, warning or error")
    asked = max(logging.DEBUG, usual - more * (logging.WARNING - logging.INFO))
    stamped = "JOURNAL_STREAM" not in os.environ
    formatter = logging.Formatter(
        ("%(asctime)s.%(msecs)03dZ " if stamped else "") + "%(levelname)s %(name)s %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
    )
    formatter.converter = time.gmtime  # noqa: TID251 - only converts what the record holds
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    handler.addFilter(LimitRepeats())
    logging.basicConfig(level=asked, handlers=[handler], force=True)
    logging.getLogger("mqtt").setLevel(logging.ERROR)  # its reconnects are told by our own transport, once a state


def keep_private() -> None:
    """Have what this process writes from now on be for its user alone: updates, states and models are nobody else's."""
    os.umask(0o077)


def _open_private(path: str, flags: int) -> int:
    """Open a file that others may not even open to read: that is enough to hold its lock."""
    descriptor = os.open(path, flags, PRIVATE)
    with suppress(OSError):  # of another user, who lets us write in it
        os.fchmod(descriptor, PRIVATE)  # of versions before
    return descriptor


@contextmanager
def hold_lock(folder: Path) -> Iterator[None]:
    """Hold a folder's lock while the block lasts; it falls with the process, however that ends.

    Raises:
        ConfigError: Another process holds it, or another user made it.
    """
    try:
        file = open(folder / "lock", "a", opener=_open_private)  # noqa: SIM115 - closed below
    except PermissionError as error:
        raise ConfigError(f"{error}; give what lies in {folder} to this user, or name another folder") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{folder} is in use by another process; end that one, or name another folder") from None
        yield
