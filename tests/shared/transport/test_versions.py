"""MQTT 5, with fallback to 3.1.1 however the broker refuses."""

from __future__ import annotations

import asyncio
import logging

import pytest

from shared.transport.base import Broker
from shared.transport.mqtt import MqttTransport

MQTT_5, MQTT_3 = 5, 4  # as a CONNECT packet numbers them


class Old:
    """A broker that accepts or refuses and does nothing else; it notes the protocol level of every CONNECT."""

    def __init__(self, answers: dict[int, bytes]) -> None:
        self.levels: list[int] = []
        self._answers = answers

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        packet = await reader.read(1000)
        self.levels.append(packet[packet.index(b"MQTT") + 4])
        writer.write(self._answers[self.levels[-1]])
        await reader.read()
        writer.close()


@pytest.mark.parametrize(
    ("answers", "levels"),
    [
        ({MQTT_5: b"\x20\x02\x00\x01", MQTT_3: b"\x20\x02\x00\x00"}, [MQTT_5, MQTT_3]),
        ({MQTT_5: b"\x20\x03\x00\x84\x00", MQTT_3: b"\x20\x02\x00\x00"}, [MQTT_5, MQTT_3]),
        ({MQTT_5: b"", MQTT_3: b"\x20\x02\x00\x00"}, [MQTT_5, MQTT_3]),
        ({MQTT_5: b"\x20\x03\x00\x00\x00", MQTT_3: b""}, [MQTT_5]),
    ],
    ids=["refuses in 3.1.1", "refuses in 5", "is silent", "has 5"],
)
async def test_falls_back(answers, levels, caplog):
    """One attempt in vain, then 3.1.1; no fall where there is no need."""

    patience_s = 3.0 if answers[MQTT_5] == b"" else 60.0  # what is not silent answers within that on any machine
    caplog.set_level(logging.INFO)
    old = Old(answers)
    server = await asyncio.start_server(old.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, MqttTransport(Broker(port=port), "a", connect_s=patience_s).running() as a:
        await a.connected.wait()
    assert old.levels == levels


async def test_after_a_silence_the_versions_take_turns():
    """A broker that hangs for a while is not taken for an old one for ever: MQTT 5 is tried again."""
    old = Old({MQTT_5: b"", MQTT_3: b""})
    server = await asyncio.start_server(old.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, MqttTransport(Broker(port=port), "a", connect_s=1.5).running():
        while len(old.levels) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert old.levels[:3] == [MQTT_5, MQTT_3, MQTT_5]


async def test_an_operator_who_asks_for_3_gets_3():
    old = Old({MQTT_3: b"\x20\x02\x00\x00"})
    server = await asyncio.start_server(old.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, MqttTransport(Broker(port=port, version=3), "a").running() as a:
        await a.connected.wait()
    assert old.levels == [MQTT_3]


@pytest.fixture
def embedded_port(brokers) -> int:
    return brokers("embedded")


@pytest.mark.broker
async def test_mqtt_5_over_the_embedded_broker(embedded_port):
    """The broker that cannot parse MQTT 5 serves a client that was configured for it."""
    transport = MqttTransport(Broker(port=embedded_port, version=5), "wants-5", connect_s=3.0)
    async with transport.running() as a, a.subscribe("wants-5") as inbox:
        await a.connected.wait()
        await a.publish("wants-5", b"through")
        assert await anext(inbox) == ("wants-5", b"through")
