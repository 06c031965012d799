"""Undeliverable and malformed messages do not stop a session."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shared.transport.base import Broker, Presence
from shared.transport.mqtt import MqttTransport
from shared.transport.session_probe import SessionProbe
from tests.benchmarks.flooder import packet
from tests.machine import configured

pytestmark = pytest.mark.broker

CONF = ("allow_anonymous true", "set_tcp_nodelay true", "max_inflight_messages 4", "persistence false")
USER_PROPERTY = 0x26
TOPIC_ALIAS = 0x23
QUICK = {"every_s": 0.5, "patience_s": 1.0}


def text(words: str) -> bytes:
    data = words.encode("utf-8", "surrogatepass")
    return len(data).to_bytes(2, "big") + data


def published(name: str, payload: bytes, *, properties: bytes = b"", retained: bool = False) -> bytes:
    """Return a PUBLISH of MQTT 5 with QoS 1."""
    size, length = len(properties), b""
    while size > 0x7F:
        length, size = length + bytes([size & 0x7F | 0x80]), size >> 7
    length += bytes([size])
    return packet(0x32 | retained, text(name) + b"\0\1" + length + properties + payload)


@contextmanager
def publisher(port: int) -> Iterator[socket.socket]:
    """Connect as a client of MQTT 5."""
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.sendall(packet(0x10, text("MQTT") + b"\5\2" + (60).to_bytes(2, "big") + b"\0" + text("publisher")))
        line.settimeout(30.0)
        assert line.recv(1) == b"\x20"
        yield line


HOSTILE = {
    "larger than any frame": published("x/m/update", bytes(300_000)),
    "at the broker's limit": published("x/m/update", bytes((8 << 20) - 100)),
    "retained": published("x/m/status", bytes(5 << 20), retained=True),
    "longer with its topic": published("x/" + "m" * 60_000, b"", properties=bytes([TOPIC_ALIAS, 0, 1]))
    + published("", bytes(200_000 - 60), properties=bytes([TOPIC_ALIAS, 0, 1])),
    "a byte order mark in a property": published(
        "x/m/update", b"?", properties=bytes([USER_PROPERTY]) + text("\ufeff") * 2
    ),
    "many properties": published(
        "x/m/update", bytes(300_000), properties=(bytes([USER_PROPERTY]) + text("name") * 2) * 20_000
    ),
}


@pytest.mark.parametrize("version", [5, 3])
@pytest.mark.parametrize("kind", list(HOSTILE))
async def test_no_message_that_a_broker_accepts_stops_the_others(tmp_path, caplog, version, kind):
    """More of them than the session has slots, before it begins, while it is away and while it is there."""
    caplog.set_level(logging.INFO)
    async with configured(tmp_path, *CONF, "max_packet_size 8388608") as place:
        broker = Broker(port=place.port, version=version)

        async def attack() -> None:
            with publisher(place.port) as line:
                line.setblocking(False)
                for _ in range(10):
                    await asyncio.get_running_loop().sock_sendall(line, HOSTILE[kind])
                for _ in range(10):
                    await asyncio.get_running_loop().sock_recv(line, 5)

        async with MqttTransport(broker, "honest").running() as honest:
            await honest.connected.wait()
            await attack()
            for number in range(2):
                server = MqttTransport(broker, "server", most_packet_bytes=264 << 10)
                async with server.running(), server.subscribe("x/+/update", "x/+/status", "x/+") as inbox:
                    await server.connected.wait()
                    await attack()
                    await honest.publish("x/honest/update", b"%d" % number)
                    while (await anext(inbox)) != ("x/honest/update", b"%d" % number):
                        pass
                    assert server.connections == 1
                await attack()
    if kind in ("larger than any frame", "retained", "at the broker's limit"):
        named = [record for record in caplog.records if "x/m/" in record.getMessage()]
        assert len(named) == 2  # once by each of the two processes, however many came


class Withholding:
    """A relay to a broker that passes on everything but the QoS 1 messages of sessions that it has taken against.

    Attributes:
        holds: Whether what is delivered is withheld from now on, until a client begins a clean session.
        for_ever: Whether clean sessions are treated alike.
        connects: CONNECT flags of each connection.
    """

    def __init__(self, port: int, *, for_ever: bool = False) -> None:
        self._port, self.holds, self.for_ever, self.connects = port, False, for_ever, list[int]()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up = await asyncio.open_connection("127.0.0.1", self._port)
        tasks = [asyncio.create_task(self._up(reader, up)), asyncio.create_task(self._down(up_reader, writer))]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        up.close()
        writer.close()

    async def _up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while whole := await read_packet(reader):
            if whole[0] == 0x10:
                self.connects.append(whole[whole.index(b"MQTT") + 5])
                self.holds = self.holds and (self.for_ever or not self.connects[-1] & 2)
            writer.write(whole)

    async def _down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while whole := await read_packet(reader):
            if not (self.holds and whole[0] & 0xF6 == 0x32):
                writer.write(whole)


async def read_packet(reader: asyncio.StreamReader) -> bytes:
    """Return the next packet whole; empty at the end."""
    try:
        head = await reader.readexactly(2)
        while head[-1] & 0x80:
            head += await reader.readexactly(1)
        size = sum((digit & 0x7F) << 7 * place for place, digit in enumerate(head[1:]))
        return head + await reader.readexactly(size)
    except (EOFError, OSError):
        return b""


@pytest.mark.parametrize("version", [5, 3])
@pytest.mark.parametrize("topic", ["", "x/server/probe"])
async def test_a_session_to_which_nothing_is_delivered_is_given_up_for_a_clean_one(tmp_path, caplog, version, topic):
    """Twice; every subscription is renewed, retained messages come, and the new session outlives its connection."""
    caplog.set_level(logging.INFO)
    async with configured(tmp_path, *CONF) as place:
        relay = Withholding(place.port)
        listener = await asyncio.start_server(relay.serve, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        presence = lambda: Presence("x/server/status", b"here", b"gone")  # noqa: E731
        probe = SessionProbe(topic, **QUICK)
        server = MqttTransport(Broker(port=port, version=version), "server", presence, steady_s=0.0, probe=probe)
        honest = MqttTransport(Broker(port=place.port), "honest")
        async with listener, honest.running(), server.running(), server.subscribe("x/+/update") as inbox:
            await asyncio.gather(honest.connected.wait(), server.connected.wait())
            await honest.publish("x/a/update", b"retained", retain=True)
            assert await anext(inbox) == ("x/a/update", b"retained")
            await asyncio.sleep(2.0)  # probes come back: nothing is wrong
            assert server.connections == 1
            for times in (1, 2):
                relay.holds = True
                connection = server.connection
                await connection.lost
                await server.connected.wait()
                assert await anext(inbox) == ("x/a/update", b"retained")
                await honest.publish("x/b/update", b"%d" % times)
                assert await anext(inbox) == ("x/b/update", b"%d" % times)
                assert server.connections == 1 + times
            assert not relay.connects[-1] & 2, "the session outlives its connection"
    begun = [record for record in caplog.records if record.args and record.args[2:] == ("server",)]
    assert sum(record.levelname == "WARNING" for record in begun) == 2


async def test_a_broker_that_never_returns_a_probe_is_left_in_peace(tmp_path, caplog):
    """It may not allow it: one clean session is tried, and that is reported once."""
    async with configured(tmp_path, *CONF) as place:
        relay = Withholding(place.port, for_ever=True)
        relay.holds = True
        listener = await asyncio.start_server(relay.serve, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        probe = SessionProbe("x/server/probe", every_s=0.1, patience_s=0.2)
        server = MqttTransport(Broker(port=port), "server", steady_s=0.0, probe=probe)
        async with listener, server.running():
            await server.connected.wait()
            while not any("x/server/probe" in record.getMessage() for record in caplog.records):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            await asyncio.sleep(2.0)
            assert server.connections == 2
    assert sum("x/server/probe" in record.getMessage() for record in caplog.records) == 1
