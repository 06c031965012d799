"""The agent as a process of its own, and its end."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

SITE, DEVICE = "lab", "board"
LIMIT_S = 120.0
DIGITS = 'source = "digits"'


def write_config(folder: Path, port: int, data: str = DIGITS, more: str = "") -> Path:
    path = folder / "agent.toml"
    path.write_text(
        f'device = "{DEVICE}"\nsite = "{SITE}"\nstate_dir = "{folder}/state"\n{more}\n'
        f"[broker]\nport = {port}\n[trainer]\nthreads = 1\n[data]\n{data}\n"
    )
    return path


async def start(config: Path, command: str = "run") -> Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "device_agent", command, "--config", str(config)), stdout=PIPE, stderr=PIPE
    )


@asynccontextmanager
async def living(config: Path) -> AsyncIterator[Process]:
    """Run an agent while the block lasts; nothing of it is left when a test fails."""
    process = await start(config)
    family = []
    try:
        yield process
    finally:
        if process.returncode is None:
            family = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            await process.communicate()
        for child in family:
            child.kill()


async def stop(process: Process) -> tuple[float, list[str]]:
    """Send SIGTERM; return the seconds until it was gone with its children, and what it said till then."""
    children = psutil.Process(process.pid).children(recursive=True)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, said = await asyncio.wait_for(process.communicate(), 90)
    seconds = time.monotonic() - began
    assert process.returncode == 0, said.decode()
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    return seconds, said.decode().splitlines()


async def line_with(process: Process, words: str) -> str:
    async with asyncio.timeout(LIMIT_S):
        while words not in (line := (await process.stderr.readline()).decode()):
            assert line, f"it ended without saying {words!r}"
    return line
