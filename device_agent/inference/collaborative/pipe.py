"""Requests for the server's half between inference process and agent, which has the only connection to the broker.

A socket pair beside the pipes of commands, which are answered in their order and are not to wait for a network: u32
length, MessagePack, and the bytes of a payload behind it. Either side that is gone ends it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeAlias

import msgspec

from device_agent.inference.collaborative.interface import AskTop, Half, TopReply
from shared.errors import FieldFleetError, InferenceRefused, Unreachable
from shared.protocol.inference.collaborative import TopTiming
from shared.runtime import backports

log = logging.getLogger(__name__)

HEAD_BYTES = 4
MAX_BYTES = 256 << 20
"""Of a message or a payload: more is said by nobody of ours."""
UNREACHABLE = "unreachable"
SLACK_S = 5.0
"""Beyond a request's deadline, for an agent that has other things to do."""


class TopAsked(msgspec.Struct, frozen=True, tag=True):
    """Process -> agent: have the server's half run on features, `size` bytes of payload right behind this.

    Attributes:
        number: Of the request, for its answer.
        parameters: Their SHA-256.
        deadline_s: Seconds that are left.
    """

    number: int
    name: str
    version: int
    parameters: bytes
    deadline_s: float
    size: int


class TopReplied(msgspec.Struct, frozen=True, tag=True):
    """Agent -> process: the outputs, `size` bytes of payload right behind this; other fields as in `TopReply`."""

    number: int
    size: int
    timing: TopTiming
    round_trip_s: float
    bytes_up: int
    bytes_down: int


class TopFailed(msgspec.Struct, frozen=True, tag=True):
    """Agent -> process: there are none, and why; reason `unreachable` where nothing was heard."""

    number: int
    reason: str
    cause: str
    size: int = 0


OnPipe: TypeAlias = TopAsked | TopReplied | TopFailed
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[OnPipe] = msgspec.msgpack.Decoder(OnPipe)


def _write(writer: asyncio.StreamWriter, message: OnPipe, parts: Sequence[bytes | memoryview] = ()) -> None:
    data = _encoder.encode(message)
    writer.write(len(data).to_bytes(HEAD_BYTES, "little") + data)
    for part in parts:
        writer.write(part)


async def _read(reader: asyncio.StreamReader) -> tuple[OnPipe, bytes] | None:
    """Return the next message and its payload; None where the other side is gone."""
    try:
        size = int.from_bytes(await reader.readexactly(HEAD_BYTES), "little")
        message = _decoder.decode(await reader.readexactly(min(size, MAX_BYTES)))
        return message, await reader.readexactly(min(message.size, MAX_BYTES))
    except (ConnectionError, asyncio.IncompleteReadError):
        return None


class TopPipe:
    """The inference process's end: asks the agent.

    Attributes:
        hearing: Hears the agent, once somebody has begun that.
    """

    hearing: asyncio.Task[None] | None = None

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._waiting: dict[int, asyncio.Future[TopReply]] = {}
        self._number, self._is_open = 0, True

    async def __call__(self, half: Half, parts: Sequence[memoryview], deadline_s: float) -> TopReply:
        """Have the server's half run on features, by the agent.

        Args:
            parts: The payload of features.
            deadline_s: Seconds after which nobody waits for it any more.

        Raises:
            Unreachable: The agent is gone, or as `RemoteTop`.
            InferenceRefused: As `RemoteTop`.
        """
        if not self._is_open:
            raise Unreachable("the agent is gone")
        self._number += 1
        waiting: asyncio.Future[TopReply] = asyncio.get_running_loop().create_future()
        number, size = self._number, sum(part.nbytes for part in parts)
        asked = TopAsked(number, half.name, half.version, half.parameters, deadline_s, size)
        self._waiting[number] = waiting
        try:
            _write(self._writer, asked, parts)
            async with backports.timeout(deadline_s + SLACK_S):
                return await waiting
        except TimeoutError:
            raise Unreachable("the agent does not answer") from None
        finally:
            del self._waiting[number]

    async def run(self) -> None:
        """Hear the agent until it is gone; whoever waits then is told."""
        try:
            while (heard := await _read(self._reader)) is not None:
                self._hear(*heard)
        finally:
            self._is_open = False
            self._writer.close()
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(Unreachable("the agent is gone"))

    def _hear(self, message: OnPipe, data: bytes) -> None:
        waiting = self._waiting.get(message.number)
        if waiting is None or waiting.done():
            return
        match message:
            case TopReplied():
                told = message.round_trip_s, message.bytes_up, message.bytes_down
                waiting.set_result(TopReply(data, message.timing, *told))
            case TopFailed(reason=reason, cause=cause):
                is_away = reason == UNREACHABLE
                waiting.set_exception(Unreachable(cause) if is_away else InferenceRefused(cause, reason=reason))


async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ask: AskTop) -> None:
    """Ask the server for the inference process, until that is gone: the agent's end.

    Args:
        ask: The way to the server.
    """
    asking = set[asyncio.Task[None]]()
    try:
        while (heard := await _read(reader)) is not None:
            message, data = heard
            if isinstance(message, TopAsked):
                task = asyncio.create_task(_relay_one(message, data, writer, ask), name="relay")
                asking.add(task)
                task.add_done_callback(asking.discard)
    finally:
        for task in list(asking):
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def _relay_one(asked: TopAsked, data: bytes, writer: asyncio.StreamWriter, ask: AskTop) -> None:
    half = Half(asked.name, asked.version, asked.parameters)
    try:
        reply = await ask(half, [memoryview(data)], asked.deadline_s)
    except InferenceRefused as error:
        _write(writer, TopFailed(asked.number, error.reason, str(error)))
    except FieldFleetError as error:  # whatever it is, somebody waits for it
        _write(writer, TopFailed(asked.number, UNREACHABLE, str(error)))
    else:
        told = reply.timing, reply.round_trip_s, reply.bytes_up, reply.bytes_down
        _write(writer, TopReplied(asked.number, len(reply.outputs), *told), [reply.outputs])
