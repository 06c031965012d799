"""A mosquitto that a test configures itself."""

from __future__ import annotations

import asyncio
import getpass
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from edge_server.fleet import broker
from edge_server.fleet.broker import PrivateBroker
from shared.runtime.processes import terminate


@asynccontextmanager
async def configured(folder: Path, *lines: str, port: int = 0) -> AsyncIterator[PrivateBroker]:
    """Run it on loopback while the block lasts, with these lines of configuration besides the necessary ones."""
    program = broker.mosquitto()
    if not program:
        pytest.skip("mosquitto is not installed")
    port = port or broker.free_port()
    settings = folder / "own.conf"
    # Started by root, it would become another user, who may not read this folder.
    own = [f"listener {port} 127.0.0.1", "persistence false", f"user {getpass.getuser()}"]
    settings.write_text("\n".join([*own, *lines, ""]))
    with (folder / "own.log").open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            program, "-c", str(settings), stdin=DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        await broker._listening(process, port, folder / "own.log")
        yield PrivateBroker(port, "mosquitto", process)
    finally:
        await terminate(process)
