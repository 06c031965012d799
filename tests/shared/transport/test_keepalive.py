"""Keep-alive: a connection with traffic stays, even if its ping is late."""

from __future__ import annotations

from dataclasses import replace

import pytest
from paho.mqtt import client as paho

from shared.transport.base import Broker
from shared.transport.mqtt_connection import SILENT, Connection, Incoming
from shared.transport.tcp_info import Counts, Traffic
from tests.machine import configured

pytestmark = pytest.mark.broker

KEEPALIVE_S = 600
"""So long that no real second matters: time is told by the test."""
NOTHING = Counts(1, "127.0.0.1", 0.0, 0, 0, None, 0.0, is_idle=False, rtt_s=0.1, min_rtt_s=0.1)


class Passing(Traffic):
    """A connection of which the test says what passed."""

    told: Counts | None = NOTHING

    def counts(self) -> Counts | None:
        return self.told


@pytest.mark.parametrize("way", ["acked_bytes", "received_bytes"])
async def test_bytes_that_pass_keep_a_connection(tmp_path, monkeypatch, way):
    """The answer to a ping may take minutes; once nothing passes for the keep-alive, the connection is lost."""
    now, traffic = [1000.0], Passing()
    monkeypatch.setattr(paho, "time_func", lambda: now[0])
    async with configured(tmp_path, "allow_anonymous true") as place:
        broker = Broker(port=place.port, keepalive_s=KEEPALIVE_S)
        connection = Connection(broker, "device", None, Incoming(lambda *_: None, traffic))
        await connection.open(60.0)
        connection.client.loop_read = lambda: paho.MQTT_ERR_SUCCESS  # the answer does not come
        for minutes in range(1, 6):
            now[0] += 0.9 * KEEPALIVE_S
            traffic.told = replace(NOTHING, **{way: minutes})
            connection.keep_alive()
            assert not connection.lost.done()
        for _ in range(3):
            now[0] += 0.9 * KEEPALIVE_S
            connection.keep_alive()
        assert connection.lost.result() == SILENT


async def test_where_the_kernel_does_not_say_the_ping_decides(tmp_path, monkeypatch):
    now, traffic = [1000.0], Passing()
    monkeypatch.setattr(paho, "time_func", lambda: now[0])
    traffic.told = None
    async with configured(tmp_path, "allow_anonymous true") as place:
        broker = Broker(port=place.port, keepalive_s=KEEPALIVE_S)
        connection = Connection(broker, "device", None, Incoming(lambda *_: None, traffic))
        await connection.open(60.0)
        connection.client.loop_read = lambda: paho.MQTT_ERR_SUCCESS
        for _ in range(3):
            now[0] += 1.1 * KEEPALIVE_S
            connection.keep_alive()
        assert connection.lost.result() == SILENT
