"""Ending child processes: by SIGTERM or by what they were told, and by SIGKILL where that does not help in time."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import Process

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
