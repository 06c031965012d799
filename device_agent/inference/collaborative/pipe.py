"""Socket pair between inference process and agent for requests to upper layers.

Uses a socket pair of its own, because commands on the pipes are answered in order and must not wait for the network.
Format: u32 length, MessagePack, payload bytes. The relay ends when either side closes.
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
from shared.runtime.executor import BackgroundTasks

log = logging.getLogger(__name__)

HEAD_BYTES = 4
MAX_BYTES = 256 << 20
"""Limit of a message or payload."""
UNREACHABLE = "unreachable"
SLACK_S = 5.0
"""Time beyond a request's deadline, for a busy agent."""


class TopAsked(msgspec.Struct, frozen=True, tag=True):
    """Process -> agent: run the upper half on features; `size` payload bytes follow.

    Attributes:
        number: Request number, echoed in the reply.
        parameters: SHA-256 of the half's parameters, 32 bytes.
        deadline_s: Seconds left to the caller.
    """

    number: int
    name: str
    version: int
    parameters: bytes
    deadline_s: float
    size: int


class TopReplied(msgspec.Struct, frozen=True, tag=True):
    """Agent -> process: outputs; `size` payload bytes follow. Other fields as in `TopReply`."""

    number: int
    size: int
    timing: TopTiming
    round_trip_s: float
    bytes_up: int
    bytes_down: int


class TopFailed(msgspec.Struct, frozen=True, tag=True):
    """Agent -> process: the request failed; reason `unreachable` if the server did not reply."""

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
    """Return the next message and its payload; None once the other side has closed."""
    try:
        size = int.from_bytes(await reader.readexactly(HEAD_BYTES), "little")
        message = _decoder.decode(await reader.readexactly(min(size, MAX_BYTES)))
        return message, await reader.readexactly(min(message.size, MAX_BYTES))
    except (ConnectionError, asyncio.IncompleteReadError):
        return None


class TopPipe:
    """Client in the inference process; sends requests to the agent.

    Attributes:
        reader_task: Runs `run`; held so that it is not garbage-collected.
    """

    reader_task: asyncio.Task[None] | None = None

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._replies: dict[int, asyncio.Future[TopReply]] = {}
        self._number, self._is_open = 0, True

    async def __call__(self, half: Half, parts: Sequence[memoryview], deadline_s: float) -> TopReply:
        """Run the upper half on features through the agent.

        Args:
                deadline_s: Seconds that the caller waits.

        Raises:
            Unreachable: The agent is gone, or as `RemoteTop`.
            InferenceRefused: As `RemoteTop`.
        """
        if not self._is_open:
            raise Unreachable("the agent is gone")
        self._number += 1
        reply: asyncio.Future[TopReply] = asyncio.get_running_loop().create_future()
        number, size = self._number, sum(part.nbytes for part in parts)
        request = TopAsked(number, half.name, half.version, half.parameters, deadline_s, size)
        self._replies[number] = reply
        try:
            _write(self._writer, request, parts)
            async with backports.timeout(deadline_s + SLACK_S):
                return await reply
        except TimeoutError:
            raise Unreachable("the agent does not answer") from None
        finally:
            del self._replies[number]

    async def run(self) -> None:
        """Dispatch replies until the agent closes, then fail the pending requests."""
        try:
            while (incoming := await _read(self._reader)) is not None:
                self._dispatch(*incoming)
        finally:
            self._is_open = False
            self._writer.close()
            for reply in self._replies.values():
                if not reply.done():
                    reply.set_exception(Unreachable("the agent is gone"))

    def _dispatch(self, message: OnPipe, data: bytes) -> None:
        reply = self._replies.get(message.number)
        if reply is None or reply.done():
            return
        match message:
            case TopReplied():
                reply.set_result(
                    TopReply(data, message.timing, message.round_trip_s, message.bytes_up, message.bytes_down)
                )
            case TopFailed(reason=reason, cause=cause):
                is_away = reason == UNREACHABLE
                reply.set_exception(Unreachable(cause) if is_away else InferenceRefused(cause, reason=reason))


async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ask: AskTop) -> None:
    """Serve upper-half requests of the inference process until it closes: the agent's end.

    Args:
        ask: Client for the server.
    """
    asking = BackgroundTasks()
    try:
        while (incoming := await _read(reader)) is not None:
            message, data = incoming
            if isinstance(message, TopAsked):
                asking.start(_relay_request(message, data, writer, ask), "relay")
    finally:
        await asking.close()
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def _relay_request(request: TopAsked, data: bytes, writer: asyncio.StreamWriter, ask: AskTop) -> None:
    half = Half(request.name, request.version, request.parameters)
    try:
        reply = await ask(half, [memoryview(data)], request.deadline_s)
    except InferenceRefused as error:
        _write(writer, TopFailed(request.number, error.reason, str(error)))
    except FieldFleetError as error:  # the requester waits for a reply in any case
        _write(writer, TopFailed(request.number, UNREACHABLE, str(error)))
    else:
        message = TopReplied(
            request.number, len(reply.outputs), reply.timing, reply.round_trip_s, reply.bytes_up, reply.bytes_down
        )
        _write(writer, message, [reply.outputs])
