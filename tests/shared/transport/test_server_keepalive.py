"""A broker's Server Keep Alive, shorter than the configured keep-alive, is honoured: the connection stays."""

from __future__ import annotations

import asyncio
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from shared.transport.base import Broker
from shared.transport.mqtt import MqttTransport
from tests.machine import configured

ROOT = Path(__file__).resolve().parents[3]
SHORTEST_S = 10
"""mosquitto takes no smaller `max_keepalive`, and closes a connection after 1.5 times as long without a packet."""


@pytest.mark.broker
@pytest.mark.slow
async def test_a_connection_outlasts_the_brokers_shorter_keepalive(tmp_path):
    async with configured(tmp_path, "allow_anonymous true", f"max_keepalive {SHORTEST_S}") as place:
        transport = MqttTransport(Broker(port=place.port, keepalive_s=600), "quiet")
        async with transport.running():
            await transport.connected.wait()
            await asyncio.sleep(1.7 * SHORTEST_S)
            assert transport.connections == 1
            assert transport.connected.is_set()


def test_no_release_of_paho_that_ignores_it_is_allowed():
    """paho-mqtt 2.2.0 is the first that reads the property."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [paho] = [one for one in map(Requirement, project["dependencies"]) if one.name == "paho-mqtt"]
    assert "2.2.0" in paho.specifier
    assert "2.1.0" not in paho.specifier
