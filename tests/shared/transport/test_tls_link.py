"""TLS transfer: frames complete, in order, at the broker's rate."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import ssl
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from random import Random

import pytest
from paho.mqtt.client import _ConnectionState

from shared.runtime.clock import monotonic
from shared.runtime.processes import terminate
from shared.transport.base import Broker
from shared.transport.mqtt import MqttTransport
from shared.transport.mqtt_connection import Connection, Incoming
from shared.transport.send_queue import MARK_BYTES
from shared.transport.tcp_info import Traffic
from tests.benchmarks.flooder import packet
from tests.edge_server.gateway.enrolments import Authority
from tests.machine import configured, free_port

pytestmark = pytest.mark.broker

RECORD = 1 << 14
SIZES = (0, 1, 100, *(near + RECORD * times for times in (1, 2, 16) for near in (-30, -1, 0, 1)), 4 << 20)
FRAME_BYTES, MODEL_BYTES = 256 << 10, 25_000_000
KERNEL_BYTES = 16 << 20
TLS_VERSIONS = ["tlsv1.2", "tlsv1.3"]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Return a site's CA with two devices."""
    made = Authority(tmp_path_factory.mktemp("site"))
    for name in ("pi-03", "server"):
        made.issue(name)
    return made


@pytest.fixture(scope="module")
def ports(here: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, int]]:
    """Run a broker for either version of TLS; return their ports."""
    with asyncio.Runner() as runner:
        stack, found = AsyncExitStack(), {}
        for version in TLS_VERSIONS:
            started = configured(tmp_path_factory.mktemp(version), *here.lines(), f"tls_version {version}")
            found[version] = runner.run(stack.enter_async_context(started)).port
        yield found
        runner.run(stack.aclose())


@pytest.mark.parametrize(
    ("tls_version", "version", "watched"), [("tlsv1.2", 5, False), ("tlsv1.3", 5, True), ("tlsv1.3", 3, False)]
)
async def test_frames_of_all_sizes_pass_whole_and_in_order(here, ports, tls_version, version, watched) -> None:
    """One that ends with a record, or a byte beside it, waits for nothing behind it; so do small ones in one record."""
    random = Random(1)
    payloads = [random.randbytes(size) for size in SIZES] + [b"%d" % number for number in range(300)]
    at = {
        name: Broker(port=ports[tls_version], version=version, tls=here.known_as(name)) for name in ("pi-03", "server")
    }
    server = MqttTransport(at["server"], "server")
    device = MqttTransport(at["pi-03"], "pi-03", traffic=Traffic(watched=watched))
    async with server.running(), device.running(), device.subscribe("a/frame") as inbox:
        await server.connected.wait()
        await device.connected.wait()
        for payload in payloads[: len(SIZES)]:
            await server.publish("a/frame", payload)
            assert (await anext(inbox))[1] == payload
        async with asyncio.TaskGroup() as group:
            for payload in payloads[len(SIZES) :]:
                group.create_task(server.publish("a/frame", payload))
        assert [(await anext(inbox))[1] for _ in payloads[len(SIZES) :]] == payloads[len(SIZES) :]


async def test_a_model_passes_both_ways_and_the_kernel_counts_what_tls_adds(here, ports) -> None:
    """25 MB in frames; the figures of the link are of what passed it: a little more, by headers and records."""
    model = Random(2).randbytes(MODEL_BYTES)
    frames = [model[start : start + FRAME_BYTES] for start in range(0, MODEL_BYTES, FRAME_BYTES)]
    device = MqttTransport(Broker(port=ports["tlsv1.3"], tls=here.known_as("pi-03")), "pi-03")
    async with device.running(), device.subscribe("a/model") as inbox:
        await device.connected.wait()
        before = device.traffic.counts()
        for frame in frames:
            await device.publish("a/model", frame, assured=False)
        came = b"".join([(await anext(inbox))[1] for _ in frames])
        after = device.traffic.counts()
    assert came == model
    assert after.connection == before.connection
    for passed in (after.acked_bytes - before.acked_bytes, after.received_bytes - before.received_bytes):
        assert MODEL_BYTES < passed < 1.01 * MODEL_BYTES


async def test_frames_wait_while_the_broker_reads_nothing(tmp_path, here) -> None:
    async with configured(tmp_path, *here.lines()) as place:
        device = MqttTransport(Broker(port=place.port, tls=here.known_as("pi-03")), "pi-03")
        async with device.running():
            await device.connected.wait()
            os.kill(place.process.pid, signal.SIGSTOP)
            taken = [0]

            async def send() -> None:
                for _ in range(100):
                    await device.publish("a/frame", bytes(FRAME_BYTES), assured=False)
                    taken[0] += 1

            sending = [asyncio.create_task(send()) for _ in range(2)]
            await asyncio.wait(sending, timeout=0.5)
            assert taken[0] * FRAME_BYTES <= MARK_BYTES + KERNEL_BYTES
            assert device.connection.watch.waits_to_write
            os.kill(place.process.pid, signal.SIGCONT)
            await asyncio.gather(*sending)
            assert device.connection.unwritten.waiting_bytes <= MARK_BYTES


async def test_arrivals_are_timed_from_a_message_on_and_not_from_the_handshake(here, ports) -> None:
    """What a handshake, its session tickets and acknowledgements brought an hour ago begins no message."""
    ahead = [0.0]
    traffic = Traffic(clock=lambda: monotonic() + ahead[0], watched=True)
    device = MqttTransport(Broker(port=ports["tlsv1.3"], tls=here.known_as("pi-03")), "pi-03", traffic=traffic)
    async with device.running(), device.subscribe("a/frame") as inbox:
        await device.connected.wait()
        for _ in range(20):
            await device.publish("b/nobody", b"acknowledged")
            ahead[0] += 3600.0
        for _ in range(4):
            await device.publish("a/frame", bytes(1 << 20))
            await anext(inbox)
            ahead[0] += 3600.0
    arrived_bytes, arriving_s = traffic.arrived_bytes, traffic.arriving_s
    assert arriving_s < 3600.0
    assert arrived_bytes < 1.01 * (4 << 20)


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("sizes", [(10, 20, 30), (70_000, 5, 16_300, 6, 200_000, 7), (1,) * 500])
async def test_packets_that_share_a_record_are_all_taken(here, watched, sizes) -> None:
    """All in one write, so that records end within packets, and nothing comes after: no socket tells of the rest."""
    said = [bytes([number % 256]) * size for number, size in enumerate(sizes)]
    whole = b"".join(packet(0x30, b"\0\x01a" + one) for one in said)
    heard: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(packet(0x20, b"\0\0") + whole)
        await reader.read()
        writer.close()

    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(here.folder / "broker.crt", here.folder / "broker.key")
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=ours)
    place = Broker(port=server.sockets[0].getsockname()[1], version=3, tls=here.known_as("pi-03"))
    done = asyncio.Event()

    def take(_topic: str, data: bytes) -> None:
        heard.append(data)
        if len(heard) == len(said):
            done.set()

    async with server:
        connection = Connection(place, "pi-03", None, Incoming(take, Traffic(watched=watched)))
        await connection.open(60.0)
        await done.wait()
        connection.close()
    assert heard == said


@pytest.mark.parametrize("deed", ["k", "K"])
async def test_keys_may_change_in_the_middle(here, deed) -> None:
    """Lower case: the other end changes its key; upper case: it asks us to change ours too. OpenSSL's own server."""
    if not shutil.which("openssl"):
        pytest.skip("openssl is not installed")
    port, here_is = free_port(), here.folder
    pair = ["-cert", f"{here_is}/broker.crt", "-key", f"{here_is}/broker.key", "-CAfile", f"{here_is}/ca.crt"]
    server = ["openssl", "s_server", "-accept", f"127.0.0.1:{port}", "-tls1_3", "-Verify", "1", *pair]
    heard: list[tuple[str, bytes]] = []
    other = await asyncio.create_subprocess_exec(*server, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
    try:
        while b"ACCEPT" not in await other.stdout.readline():
            pass
        connection = Connection(
            Broker(port=port, version=3, tls=here.known_as("pi-03")),
            "pi-03",
            None,
            Incoming(lambda *one: heard.append(one), Traffic()),
        )
        opening = asyncio.create_task(connection.open(60.0))
        printed = b""
        while b"MQTT" not in printed:  # our CONNECT
            printed += await other.stdout.read(1 << 16)
        other.stdin.write(packet(0x20, b"\0\0"))
        await opening
        for number in range(3):
            other.stdin.write(packet(0x30, b"\0\x01a%d" % number))
            while len(heard) <= number:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            other.stdin.write(deed.encode() + b"\n")
            connection.send("b", b"said %d" % number, qos=0, retain=False)
            while b"said %d" % number not in printed:
                printed += await other.stdout.read(1 << 16)
        assert not connection.lost.done()
        connection.close()
    finally:
        await terminate(other)
    assert heard == [("a", b"0"), ("a", b"1"), ("a", b"2")]


@dataclass
class Crossed:
    """An end of a connection whose TLS must write before it reads on, or read before it writes on."""

    sock: socket.socket
    lacks_room: bool = False
    lacks_bytes: bool = False
    asked: int = 0

    def fileno(self) -> int:
        return self.sock.fileno()

    def close(self) -> None:
        self.sock.close()

    def pending(self) -> int:
        return 0

    def recv_into(self, room: memoryview) -> int:
        self.asked += 1
        if self.lacks_room:
            raise ssl.SSLWantWriteError
        self.lacks_bytes = False
        try:
            return self.sock.recv_into(room)
        except BlockingIOError as nothing:
            raise ssl.SSLWantReadError from nothing

    def send(self, data: memoryview) -> int:
        self.asked += 1
        if self.lacks_bytes:
            raise ssl.SSLWantReadError
        self.lacks_room = False
        return self.sock.send(data)


async def crossed(heard: list[bytes]) -> tuple[Connection, Crossed, socket.socket]:
    """Return a connection over such an end, that end, and the other."""
    near, far = socket.socketpair()
    near.setblocking(False)
    far.setblocking(False)
    end = Crossed(near)
    connection = Connection(Broker(version=3), "pi-03", None, Incoming(lambda _, data: heard.append(data), Traffic()))
    connection.client._sock = connection.client.secured = end
    connection.watch.begin_reading()
    return connection, end, far


async def turns(number: int = 20) -> None:
    """Let the loop look at its sockets some times."""
    for _ in range(number):
        await asyncio.sleep(0)


async def test_reading_that_waits_for_room_spins_on_nothing() -> None:
    """What is there to read is left until there is room to write, however readable the socket is."""
    heard: list[bytes] = []
    connection, end, far = await crossed(heard)
    with suppress(BlockingIOError):
        while True:
            end.sock.send(bytes(1 << 16))
    end.lacks_room = True
    far.send(packet(0x30, b"\0\x01a" + b"at last"))
    await turns()
    assert (heard, end.asked) == ([], 1)
    end.lacks_room = False
    with suppress(BlockingIOError):
        while far.recv(1 << 20):
            pass
    await turns()
    assert heard == [b"at last"]
    far.send(packet(0x30, b"\0\x01a" + b"and on"))
    await turns()
    assert heard == [b"at last", b"and on"]
    connection.close()
    far.close()


async def test_writing_that_waits_for_something_to_read_spins_on_nothing() -> None:
    heard: list[bytes] = []
    connection, end, far = await crossed(heard)
    end.lacks_bytes = True
    connection.client._state = _ConnectionState.MQTT_CS_CONNECTED
    connection.send("a", b"at last", qos=0, retain=False)
    await turns()
    assert end.asked == 1
    far.send(packet(0x30, b"\0\x01a" + b"heard"))
    await turns()
    assert heard == [b"heard"]
    assert b"at last" in far.recv(100)
    connection.close()
    far.close()
