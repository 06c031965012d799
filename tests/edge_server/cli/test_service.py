"""A server under systemd says that it runs and that it stops, whatever its run comes to."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager, suppress

import pytest

from edge_server.cli import commands
from edge_server.plan.server_config import ServerConfig
from shared.errors import ConfigError
from shared.runtime.service import ALIVE, READY, STOPPING


def test_a_server_tells_of_its_begin_and_end(tmp_path, monkeypatch):
    place = str(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", place)
    monkeypatch.setenv("WATCHDOG_USEC", "1000000")

    @asynccontextmanager
    async def connecting(*_):
        await asyncio.sleep(0)
        raise ConfigError("failed")
        yield

    from edge_server.trial import live  # noqa: PLC0415 - torch

    monkeypatch.setattr(live, "connect_site", connecting)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(place)
        listening.setblocking(False)
        with pytest.raises(ConfigError, match="failed"):
            asyncio.run(commands.serve_runs(ServerConfig(data_dir=place), None, "edge-server run"))
        told = []
        with suppress(BlockingIOError):
            while True:
                told.append(listening.recv(64))
    assert told == [READY, ALIVE, STOPPING]
