"""Keep-alive: late pings, connections with traffic, and a broker's shorter Server Keep Alive."""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from paho.mqtt import client as paho

from shared.transport.base import Broker
from shared.transport.mqtt_connection import SILENT, Connection, Incoming
from shared.transport.tcp_info import Counts, Traffic
from tests.machine import configured

ROOT = Path(__file__).resolve().parents[3]
KEEPALIVE_S, SHORTEST_S = 600, 10
"""The first so long that no real second matters; the second the least `max_keepalive` of mosquitto."""
NOTHING = Counts(1, "127.0.0.1", 0.0, 0, 0, None, 0.0, is_idle=False, rtt_s=0.1, min_rtt_s=0.1)


class Passing(Traffic):
    """A connection whose traffic the test sets."""

    told: Counts | None = NOTHING

    def counts(self) -> Counts | None:
        return self.told


@dataclass
class Clock:
    """The client's clock."""

    now: float = 1000.0


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(paho, "time_func", lambda: made.now)
    return made


@asynccontextmanager
async def connected(folder: Path, traffic: Traffic, *lines: str) -> AsyncIterator[Connection]:
    """Connect a client to a broker with these lines of configuration."""
    async with configured(folder, "allow_anonymous true", *lines) as place:
        broker = Broker(port=place.port, keepalive_s=KEEPALIVE_S)
        connection = Connection(broker, "device", None, Incoming(lambda *_: None, traffic))
        await connection.open(60.0)
        yield connection


@pytest.mark.broker
@pytest.mark.parametrize("way", ["acked_bytes", "received_bytes", ""])
async def test_bytes_that_pass_keep_a_connection(tmp_path, clock, way):
    """An answer to a ping may take minutes while bytes pass; where the kernel does not count them, the ping decides."""
    traffic = Passing()
    async with connected(tmp_path, traffic) as connection:
        connection.client.loop_read = lambda: paho.MQTT_ERR_SUCCESS  # the answer does not come
        for minutes in range(1, 6) if way else ():
            clock.now += 0.9 * KEEPALIVE_S
            traffic.told = replace(NOTHING, **{way: minutes})
            connection.keep_alive()
            assert not connection.lost.done()
        if not way:
            traffic.told = None
        for _ in range(3):
            clock.now += (0.9 if way else 1.1) * KEEPALIVE_S
            connection.keep_alive()
        assert connection.lost.result() == SILENT


@pytest.mark.broker
async def test_a_brokers_shorter_keepalive_is_kept(tmp_path, clock):
    """The next ping is due after the broker's seconds, not after the configured ones; the broker answers it."""
    log = tmp_path / "own.log"
    async with connected(tmp_path, Passing(), f"max_keepalive {SHORTEST_S}", "log_type all") as connection:
        clock.now += 0.9 * SHORTEST_S
        connection.keep_alive()
        await asyncio.sleep(0.1)
        assert "PINGREQ" not in log.read_text()
        clock.now += 0.1 * SHORTEST_S
        connection.keep_alive()
        async with asyncio.timeout(60.0):
            while "Sending PINGRESP to device" not in log.read_text():  # noqa: ASYNC110 - a line of another process
                await asyncio.sleep(0.01)
        assert not connection.lost.done()


def test_no_release_of_paho_that_ignores_it_is_allowed():
    """paho-mqtt 2.2.0 is the first that reads the property."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [paho] = [one for one in map(Requirement, project["dependencies"]) if one.name == "paho-mqtt"]
    assert "2.2.0" in paho.specifier
    assert "2.1.0" not in paho.specifier
