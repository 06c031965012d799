"""An agent under systemd: it says that it runs before it has any broker, and that it stops."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import suppress

import msgspec

from device_agent.commands.run import serve
from device_agent.config import AgentConfig
from shared.runtime.service import ALIVE, READY, STOPPING

LIMIT_S = 300.0


def test_an_agent_without_a_broker_is_up_and_pings(tmp_path, monkeypatch):
    """A board that boots before its network is no failed service, and its children cannot speak for it."""
    place = str(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", place)
    monkeypatch.setenv("WATCHDOG_USEC", "20000")
    told: list[bytes] = []

    async def story(listening: socket.socket, config: AgentConfig) -> None:
        loop = asyncio.get_running_loop()
        living = asyncio.create_task(serve(config))
        while told.count(ALIVE) < 3:
            told.append(await asyncio.wait_for(loop.sock_recv(listening, 64), LIMIT_S))
        assert "NOTIFY_SOCKET" not in os.environ
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(living, LIMIT_S)
        with suppress(BlockingIOError):
            while True:
                told.append(listening.recv(64))

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening, socket.socket() as nobody:
        listening.bind(place)
        listening.setblocking(False)
        nobody.bind(("127.0.0.1", 0))  # a port at which nobody listens
        told_of = {"broker": {"port": nobody.getsockname()[1]}, "data": {"source": "npz", "path": str(tmp_path / "no")}}
        config = msgspec.convert({"device": "a", "state_dir": str(tmp_path / "state"), **told_of}, AgentConfig)
        asyncio.run(story(listening, config))
    assert told[0] == READY
    assert told[-1] == STOPPING
