"""MQTT session takeover: the new connection receives all messages."""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest

pytestmark = pytest.mark.broker

CONNACK, PUBLISH, SUBACK, PINGRESP = 0x20, 0x30, 0x90, 0xD0
DISCONNECT, PING = b"\xe0\x00", b"\xc0\x00"
ACCEPTED = 0
KEPT_SESSION, WILL = 0x00, 0x04
TIMES, MANY = 5, 50
numbers = itertools.count()


def text(written: str) -> bytes:
    """Return a string as MQTT writes it: two bytes of length, then UTF-8."""
    return struct.pack("!H", len(written)) + written.encode()


def packet(kind: int, *parts: bytes) -> bytes:
    """Return a packet of less than 128 bytes, whose length takes one byte."""
    body = b"".join(parts)
    assert len(body) < 1 << 7
    return bytes([kind, len(body)]) + body


def connect(client: str, will: tuple[str, str] | None = None) -> bytes:
    """Return the first packet of a client of 3.1.1 that keeps its session."""
    said = [text(part) for part in will] if will else []
    return packet(0x10, text("MQTT"), bytes([4, WILL if will else KEPT_SESSION, 0, 60]), text(client), *said)


def subscribe(pattern: str) -> bytes:
    return packet(0x82, b"\x00\x01", text(pattern), b"\x00")


def publish(topic: str, word: str, *, retain: bool = False) -> bytes:
    return packet(PUBLISH | retain, text(topic), word.encode())


@dataclass
class Line:
    """A connection to a broker, packet by packet: no client's own care comes between."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def read(self) -> tuple[int, bytes]:
        """Return the next packet's first byte and what follows its length."""
        kind, size = await self.reader.readexactly(2)
        return kind, await self.reader.readexactly(size)

    async def asked(self, question: bytes, answer: int) -> bytes:
        """Return the answer to a packet; what is published meanwhile passes by."""
        self.writer.write(question)
        while (read := await self.read())[0] != answer:
            assert read[0] & 0xF0 == PUBLISH
        return read[1]


@dataclass
class Place:
    """A broker and names that no other test has."""

    port: int
    client: str
    topic: str

    @asynccontextmanager
    async def line(self) -> AsyncIterator[Line]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield Line(reader, writer)
        finally:
            writer.transport.abort()

    @asynccontextmanager
    async def accepted(self, client: str, will: tuple[str, str] | None = None) -> AsyncIterator[Line]:
        async with self.line() as line:
            assert (await line.asked(connect(client, will), CONNACK))[1] == ACCEPTED
            yield line


@pytest.fixture(params=["mosquitto", "embedded"])
def place(request, brokers) -> Place:
    number = next(numbers)
    return Place(brokers(request.param), f"taken-{number}", f"taken/{number}")


async def require_heard(talker: Line, listener: Line, topic: str, word: str) -> None:
    talker.writer.write(publish(topic, word))
    assert await listener.read() == (PUBLISH, text(topic) + word.encode())


@pytest.mark.parametrize("goodbye", [b"", DISCONNECT], ids=["none", "late"])
async def test_whoever_connects_in_place_of_an_earlier_connection_is_heard_and_hears(place, goodbye):
    """Nobody said goodbye on the earlier one, or it comes just when the next one knocks."""
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(place.accepted(f"{place.client}-other"))
        before = await stack.enter_async_context(place.accepted(place.client))
        for number in range(TIMES):
            line = await stack.enter_async_context(place.line())
            line.writer.write(connect(place.client))
            before.writer.write(goodbye)
            assert (await line.read())[0] == CONNACK
            await line.asked(subscribe(place.topic), SUBACK)
            await require_heard(other, line, place.topic, f"word {number}")
            before = line


async def test_the_will_of_an_earlier_connection_is_told_before_the_next_one_speaks_or_never(place):
    """It is never the next one's. (mosquitto tells none in a session that goes on; amqtt tells it.)"""
    other_id, topic = f"{place.client}-other", place.topic
    async with place.accepted(other_id) as other, place.accepted(place.client, (topic, "1 died")):
        await other.asked(subscribe(topic), SUBACK)
        async with place.accepted(place.client, (topic, "2 died")) as second:
            second.writer.write(publish(topic, "2 lives"))
            words = []
            while not words or words[-1] != b"2 lives":
                words.append((await other.read())[1].removeprefix(text(topic)))
    assert words[:-1] in ([], [b"1 died"])


async def test_a_client_is_told_what_is_retained_while_others_subscribe(place):
    """It is not hung up on, and is told of its own subscriptions alone."""
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(place.accepted(f"{place.client}-other"))
        for number in range(MANY):
            other.writer.write(publish(f"{place.topic}/{number}", "kept", retain=True))
        await other.asked(PING, PINGRESP)
        await other.asked(subscribe(f"{place.topic}/+"), SUBACK)
        line = await stack.enter_async_context(place.line())
        line.writer.write(connect(place.client))
        other.writer.write(b"".join(subscribe(f"{place.topic}/more/{number}") for number in range(MANY)))
        assert (await line.read())[0] == CONNACK
        line.writer.write(PING)
        assert (await line.read())[0] == PINGRESP, "it is told what only the other one asked for"
        line.writer.write(subscribe(f"{place.topic}/{MANY - 1}"))
        told = [await line.read() for _ in range(2)]
        assert sorted(kind for kind, _ in told) == [PUBLISH | 1, SUBACK]


async def test_a_session_that_goes_on_is_not_ended_by_others_that_subscribe_meanwhile(place):
    """What is retained for it takes the broker some turns, in which the subscriptions become more."""
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(place.accepted(f"{place.client}-other"))
        before = await stack.enter_async_context(place.accepted(place.client))
        for number in range(MANY):
            other.writer.write(publish(f"{place.topic}/{number}", "kept", retain=True))
            await before.asked(subscribe(f"{place.topic}/{number}"), SUBACK)
        line = await stack.enter_async_context(place.line())
        line.writer.write(connect(place.client))
        before.writer.write(DISCONNECT)
        assert (await line.read())[0] == CONNACK
        for number in range(MANY):
            await other.asked(subscribe(f"{place.topic}/more/{number}"), SUBACK)
        await line.asked(PING, PINGRESP)
        await line.asked(subscribe(f"{place.topic}/last"), SUBACK)
        await require_heard(other, line, f"{place.topic}/last", "heard")
