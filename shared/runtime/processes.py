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
from contextlib import contextmanager
from pathlib import Path

from shared.errors import ConfigError

EXIT_PATIENCE_S = 5.0


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


def configure(level: str) -> None:
    """Set up logging for a process.

    Args:
        level: Name of a level: debug, info, warning, error.
    """
    stamped = "JOURNAL_STREAM" not in os.environ
    formatter = logging.Formatter(
        ("%(asctime)s.%(msecs)03dZ " if stamped else "") + "%(levelname)s %(name)s %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
    )
    formatter.converter = time.gmtime  # noqa: TID251 - only converts what the record holds
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("mqtt").setLevel(logging.ERROR)  # its reconnects are told by our own transport, once a state


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
