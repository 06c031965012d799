"""A packet that is larger than any of ours takes no memory, and keeps nothing else from coming."""

from __future__ import annotations

import asyncio
import socket
import tracemalloc
from random import Random

import pytest

from edge_server.fleet import broker
from shared.transport.base import Broker, Inbox
from shared.transport.mqtt import MqttTransport
from shared.transport.mqtt_connection import Connection, Incoming
from shared.transport.packet_limit import MOST_PACKET_BYTES, MOST_RECEIVED_BYTES
from shared.transport.socket_watch import BATCH_PACKETS
from shared.transport.tcp_info import Traffic
from tests.benchmarks.flooder import connected, packet
from tests.machine import configured

pytestmark = pytest.mark.broker

LARGE_BYTES = 24 << 20


def published(name: str, payload: bytes, *, retained: bool) -> bytes:
    """Return a packet that publishes, QoS 1 so that the broker repeats what is not acknowledged."""
    topic = name.encode()
    return packet(0x32 | retained, len(topic).to_bytes(2, "big") + topic + b"\0\1" + payload)


@pytest.mark.parametrize("version", [5, 3])
@pytest.mark.parametrize("retained", [False, True])
async def test_a_packet_beyond_the_limit_is_not_held(tmp_path, version, retained):
    """The connection stands, what comes behind it is heard, and on a new connection it is again no matter."""
    large = published("a/large", bytes(LARGE_BYTES), retained=retained)
    async with configured(tmp_path, "allow_anonymous true", "set_tcp_nodelay true") as place:
        device = MqttTransport(Broker(port=place.port, version=version), "device")
        async with device.running(), device.subscribe("a/+") as inbox:
            await device.connected.wait()
            with connected(place.port) as stranger:
                tracemalloc.start()
                stranger.setblocking(False)
                await _send(stranger, large)
                await _send(stranger, published("a/small", b"heard", retained=False))
                assert await anext(inbox) == ("a/small", b"heard")
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
            assert peak < MOST_RECEIVED_BYTES
            assert device.connections == 1
            device.connection.client.socket().shutdown(socket.SHUT_RDWR)
            await device.connection.lost
            await device.connected.wait()
            await device.publish("a/small", b"again")
            assert await anext(inbox) == ("a/small", b"again")
            assert device.connections == 2


@pytest.mark.parametrize("version", [5, 3])
async def test_what_is_not_admitted_on_its_topic_passes_by(tmp_path, version):
    """Asked about before it has come whole; what is small, or admitted, is heard, in order, however it is cut."""
    frame, asked = bytes(256 << 10), list[tuple[str, int]]()

    def admits(name: str, size: int) -> bool:
        asked.append((name, size))
        return name != "a/flood"

    async with configured(tmp_path, "allow_anonymous true", "set_tcp_nodelay true") as place:
        device = MqttTransport(Broker(port=place.port, version=version), "device", admits=admits)
        async with device.running(), device.subscribe("a/+") as inbox:
            await device.connected.wait()
            with connected(place.port) as stranger:
                stranger.setblocking(False)
                words = [(f"a/{number}", b"%d" % number * (number + 1)) for number in range(200)]
                for number, (name, word) in enumerate(words):
                    if number % 10 == 0:
                        await _send(stranger, published("a/flood", frame, retained=False))
                        await _send(stranger, published("a/good", frame, retained=False))
                    await _send(stranger, published(name, word, retained=False))
                heard = [await anext(inbox) for _ in range(220)]
            assert [(name, data) for name, data in heard if name != "a/good"] == words
            assert heard.count(("a/good", frame)) == 20
            assert {name for name, _ in asked} == {"a/flood", "a/good"}
            assert all(len(frame) <= size <= len(frame) + 64 for _, size in asked)
            assert device.connection.client.skipped_packets == 20
            assert device.connections == 1


@pytest.mark.parametrize("version", [5, 3])
async def test_what_is_on_its_way_on_a_closed_topic_is_dropped_before_it_is_a_message(tmp_path, version):
    """The others are heard, each whole and in order, of whatever length and quality; what asks for an answer too."""
    closed, draw = {b"a/flood"}, Random(18)

    def packets(number: int) -> bytes:
        sizes = (draw.choice((0, 1, 90, 120, 130, 700)) for _ in range(20))
        flood = b"".join(unconfirmed("a/flood", bytes(size), retained=draw.random() < 0.1) for size in sizes)
        data = b"%d" % number * draw.choice((1, 50, 5000, 30_000))
        make = draw.choice((unconfirmed, published))
        return flood + make("a/good", data, retained=False)

    async with configured(tmp_path, "allow_anonymous true", "set_tcp_nodelay true") as place:
        device = MqttTransport(Broker(port=place.port, version=version), "device", closed=closed)
        async with device.running(), device.subscribe("a/+") as inbox:
            await device.connected.wait()
            heard = list[bytes]()
            with connected(place.port) as stranger:
                stranger.setblocking(False)
                for number in range(200):
                    await _send(stranger, packets(number))
                    while b"%d" % number != (await heard_next(inbox, heard))[: len(b"%d" % number)]:
                        pass
                await _send(stranger, published("a/flood", b"confirmed", retained=False))
                assert await anext(inbox) == ("a/flood", b"confirmed")
            assert len([data for data in heard if not data.strip(b"\0")]) < 400
            assert device.connections == 1


class Line:
    """A socket on which everything has come, and that gives some of it at a time."""

    def __init__(self, data: bytes) -> None:
        self._left = memoryview(data)

    def recv(self, size: int) -> bytes:
        if not self._left:
            raise BlockingIOError
        taken, self._left = self._left[: min(size, 70_000)], self._left[min(size, 70_000) :]
        return bytes(taken)

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        """It holds nothing."""


async def test_a_frame_is_dealt_with_before_the_next_is_read():
    """What was read and waits takes memory: a window of twenty devices is ten megabytes."""
    taken = list[bytes]()
    incoming = Incoming(lambda _topic, data: taken.append(data), Traffic())
    connection = Connection(Broker(version=3), "device", None, incoming)
    frames = [bytes([number]) * (256 << 10) for number in range(1, 21)]
    connection.client._sock = Line(b"".join(unconfirmed("a/good", one, retained=False) for one in frames))
    for count in range(1, len(frames) + 1):
        connection.watch.read()
        assert taken == frames[:count]


async def test_small_packets_are_read_many_at_a_time():
    """A turn of everything else for each of them would cost more than they do."""
    taken = list[bytes]()
    incoming = Incoming(lambda _topic, data: taken.append(data), Traffic())
    connection = Connection(Broker(version=3), "device", None, incoming)
    connection.client._sock = Line(unconfirmed("a/good", b"word", retained=False) * (2 * BATCH_PACKETS))
    connection.watch.read()
    assert len(taken) == BATCH_PACKETS
    await asyncio.sleep(0)
    assert len(taken) == 2 * BATCH_PACKETS


async def heard_next(inbox: Inbox, heard: list[bytes]) -> bytes:
    """Take the next message of the good topic; note all that come."""
    while True:
        name, data = await anext(inbox)
        heard.append(data)
        if name == "a/good":
            return data


def unconfirmed(name: str, payload: bytes, *, retained: bool) -> bytes:
    """Return a packet that publishes, QoS 0."""
    topic = name.encode()
    return packet(0x30 | retained, len(topic).to_bytes(2, "big") + topic + payload)


async def _send(line: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(line, data)


async def test_the_embedded_broker_hangs_up_on_such_a_packet(tmp_path):
    """By the length that it announces: nothing of its payload need be sent."""
    async with broker.run_private_broker(tmp_path, embedded=True) as place:
        with connected(place.port) as stranger:
            stranger.settimeout(30.0)
            stranger.sendall(published("a/large", bytes(MOST_PACKET_BYTES + 1), retained=False)[:64])
            assert stranger.recv(1) == b""
