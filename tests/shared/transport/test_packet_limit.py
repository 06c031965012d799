"""The largest payload: announced by the broker, or learnt from how it closes the connection."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import TooLarge, Unreachable
from shared.protocol.topics import topic
from shared.transport.base import Broker
from shared.transport.memory import MemoryTransport
from shared.transport.mqtt import MqttTransport
from shared.transport.mqtt_connection import SILENT
from shared.transport.packet_limit import (
    LEAST_BYTES,
    MOST_BYTES,
    ROOM_BYTES,
    Limit,
    PayloadWatch,
    apply_connack,
    apply_connection_end,
    apply_delivery,
    apply_refusal,
)
from shared.transport.simulated_link import Link, Rate
from tests.machine import configured, free_port
from tests.naming import naming

KIB = 1024


def test_the_brokers_word_counts_for_its_connection():
    """Less room for the topic and MQTT's header, and only until a connection comes on which it says something else."""
    limit = apply_connack(Limit(), 2 * KIB * KIB)
    assert limit.payload_bytes == 2 * KIB * KIB - ROOM_BYTES
    assert apply_connack(limit, 300).payload_bytes == 44
    assert apply_connack(limit, 10).payload_bytes == 0
    assert apply_connack(limit, None).payload_bytes == apply_connack(limit, 2**32 - 1).payload_bytes == MOST_BYTES


def test_room_is_enough_for_the_longest_topic():
    """Fixed header 5 bytes, topic length 2, packet id 2, no properties 1."""
    longest = topic("s" * 64, "d" * 64, "status")
    assert 5 + 2 + len(longest) + 2 + 1 <= ROOM_BYTES


def test_one_end_is_an_accident_two_in_a_row_are_a_refusal():
    """256 KiB twice in doubt: half of it. Then again in doubt, but acknowledged in between: an accident."""
    once = apply_connection_end(Limit(), 256 * KIB)
    assert once.payload_bytes == MOST_BYTES
    twice = apply_connection_end(once, 256 * KIB)
    assert twice.payload_bytes == 128 * KIB
    assert (
        apply_connection_end(apply_delivery(apply_connection_end(twice, 128 * KIB), 128 * KIB), 128 * KIB).payload_bytes
        == 128 * KIB
    )


def test_a_smaller_acknowledgement_clears_nothing():
    """That 100 KiB arrived says nothing about 256."""
    assert (
        apply_connection_end(
            apply_delivery(apply_connection_end(Limit(), 256 * KIB), 100 * KIB), 256 * KIB
        ).payload_bytes
        == 128 * KIB
    )


def test_an_end_without_a_large_payload_says_nothing():
    """Neither for nor against the one that is suspected."""
    suspect = apply_connection_end(Limit(), 256 * KIB)
    assert apply_connection_end(suspect, 0) == apply_connection_end(suspect, LEAST_BYTES) == suspect


def test_what_the_broker_allows_is_never_suspected():
    """It has announced 1 MiB: whatever ends its connections, it is not 256 KiB."""
    limit = apply_connack(Limit(), KIB * KIB)
    assert apply_connection_end(apply_connection_end(limit, 256 * KIB), 256 * KIB) == limit


@settings(max_examples=200, derandomize=True, deadline=None)
@given(sizes=st.lists(st.integers(0, MOST_BYTES), max_size=40), clear=st.booleans())
def test_it_only_shrinks_and_never_below_the_least(sizes, clear):
    """Whatever happens: monotone, and frames of 16 KiB always pass."""
    limit = Limit()
    for size in sizes:
        after = apply_refusal(limit, size) if clear else apply_connection_end(limit, size)
        assert LEAST_BYTES <= after.payload_bytes <= limit.payload_bytes
        limit = after


def test_without_mqtt(real):
    """Memory has no limit worth the name, and a link that of what is behind it."""
    memory = MemoryTransport()
    assert Link(memory, Rate(), lambda: 0.0).max_payload_bytes == memory.max_payload_bytes == MOST_BYTES


@pytest.mark.broker
async def test_a_broker_that_announces(tmp_path):
    """MQTT 5: known once connected; more is refused here, at once, and the connection lives on; all of it passes."""
    async with configured(tmp_path, "allow_anonymous true", f"max_packet_size {64 * KIB}") as broker:
        device = MqttTransport(Broker(port=broker.port), "device")
        async with device.running(), device.subscribe("x") as inbox:
            await device.connected.wait()
            connection, most = device.connection, device.max_payload_bytes
            assert most == 64 * KIB - ROOM_BYTES
            for assured in (True, False):
                with pytest.raises(TooLarge, match=naming(most + 1, "x", most)):
                    await device.publish("x", bytes(most + 1), assured=assured)
                await device.publish("x", bytes(most), assured=assured)
                assert len((await anext(inbox))[1]) == most
            assert device.connection is connection


@pytest.mark.broker
@pytest.mark.parametrize("assured", [True, False])
async def test_a_broker_that_only_closes_the_connection(tmp_path, caplog, assured):
    """3.1.1 and at most 100 KiB: after two ends 256 KiB becomes 128, after two more 64, which passes and stays."""
    async with configured(tmp_path, "allow_anonymous true", f"max_packet_size {100 * KIB}") as broker:
        device = MqttTransport(Broker(port=broker.port, version=3), "device")
        async with device.running(), device.subscribe("x") as inbox:
            seen = []
            arriving = asyncio.create_task(anext(inbox))
            while not arriving.done():
                await device.connected.wait()
                carrier = device.connection
                lost = carrier.lost
                seen.append(min(256 * KIB, device.max_payload_bytes))
                with suppress(Unreachable):
                    await device.publish("x", bytes(seen[-1]), assured=assured)
                await asyncio.wait({arriving, lost}, return_when=asyncio.FIRST_COMPLETED)
                while lost.done() and device.connection is carrier:  # noqa: ASYNC110 - it tells its transport
                    await asyncio.sleep(0)
            assert seen == [256 * KIB] * 2 + [128 * KIB] * 2 + [64 * KIB]
            assert len(arriving.result()[1]) == 64 * KIB
            assert device.max_payload_bytes == 64 * KIB
    assert [record.args for record in caplog.records if record.args and isinstance(record.args[0], int)] == [
        (256 * KIB, 128 * KIB),
        (128 * KIB, 64 * KIB),
    ]


@pytest.mark.broker
@pytest.mark.parametrize("version", [3, 5])
async def test_a_broker_that_is_killed_again_and_again(tmp_path, version):
    """It takes everything, and dies after each large payload it has acknowledged: nothing is held against the size."""
    port = free_port()
    async with MqttTransport(Broker(port=port, version=version), "device", steady_s=0.0).running() as device:
        for _ in range(3):
            async with configured(tmp_path, "allow_anonymous true", port=port) as broker:
                await device.connected.wait()
                lost = device.connection.lost
                await device.publish("x", bytes(256 * KIB), assured=False)
                await device.publish("x", b"")
                broker.process.kill()
                await lost
        assert device.max_payload_bytes == MOST_BYTES


async def test_a_silent_link_refuses_nothing():
    """Twice the keep-alive ran out with 256 KiB under way: a dead radio, not a broker that closes the connection."""
    device = MqttTransport(Broker(), "device")
    carried = PayloadWatch()
    carried.sent(1, 256 * KIB)
    for _ in range(3):
        assert not device.reduce_payload_limit(SimpleNamespace(carried=carried), SILENT)
    assert device.max_payload_bytes == MOST_BYTES
    assert [device.reduce_payload_limit(SimpleNamespace(carried=carried), "reset") for _ in range(2)] == [
        False,
        True,
    ]


async def test_a_broker_that_says_it_when_it_is_too_late():
    """It announces nothing and answers a large payload with DISCONNECT 0x95: half the size at the first time."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1000)
        writer.write(b"\x20\x03\x00\x00\x00")
        while len(await reader.read(100_000)) < 1000:
            pass
        writer.write(b"\xe0\x02\x95\x00")
        await writer.drain()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, MqttTransport(Broker(port=port), "device").running() as device:
        await device.connected.wait()
        with pytest.raises(Unreachable):
            await device.publish("x", bytes(40 * KIB))
        while device.connected.is_set():  # noqa: ASYNC110 - its end is told to the transport
            await asyncio.sleep(0)
        assert device.max_payload_bytes == 20 * KIB
