"""Socket pair between inference process and agent for requests to upper layers.

Uses a socket pair of its own, because commands on the pipes are answered in order and must not wait for the network.
The relay ends when either side closes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from device_agent.inference.collaborative.interface import AskTop, Half, TopReply
from device_agent.inference.messages import encode_frame, read_frame
from shared.errors import FieldFleetError, InferenceRefused, Unreachable
from shared.runtime import backports
from shared.runtime.executor import BackgroundTasks

log = logging.getLogger(__name__)

UNREACHABLE = "unreachable"
SLACK_S = 5.0
"""Time beyond a request's deadline, for a busy agent."""


class TopAsked(msgspec.Struct, frozen=True, tag=True):
    """Process -> agent: run the upper half on features.

    Attributes:
        number: Request number, echoed in the reply.
        deadline_s: Seconds left to the caller.
        features: Their payload.
    """

    number: int
    half: Half
    deadline_s: float
    features: bytes


class TopReplied(msgspec.Struct, frozen=True, tag=True):
    """Agent -> process: the server's reply."""

    number: int
    reply: TopReply


class TopFailed(msgspec.Struct, frozen=True, tag=True):
    """Agent -> process: the request failed; reason `unreachable` if the server did not reply."""

    number: int
    reason: str
    cause: str


_decoder: msgspec.msgpack.Decoder[TopAsked | TopReplied | TopFailed] = msgspec.msgpack.Decoder(
    TopAsked | TopReplied | TopFailed
)


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

        Raises:
            Unreachable: The agent is gone, or as `RemoteTop`.
            InferenceRefused: As `RemoteTop`.
        """
        if not self._is_open:
            raise Unreachable("the agent is gone")
        self._number += 1
        reply: asyncio.Future[TopReply] = asyncio.get_running_loop().create_future()
        number = self._number
        self._replies[number] = reply
        try:
            self._writer.write(encode_frame(TopAsked(number, half, deadline_s, b"".join(parts))))
            async with backports.timeout(deadline_s + SLACK_S):
                return await reply
        except TimeoutError:
            raise Unreachable("the agent does not answer") from None
        finally:
            del self._replies[number]

    async def run(self) -> None:
        """Dispatch replies until the agent closes, then fail the pending requests."""
        try:
            while (message := await read_frame(self._reader, _decoder)) is not None:
                self._dispatch(message)
        finally:
            self._is_open = False
            self._writer.close()
            for reply in self._replies.values():
                if not reply.done():
                    reply.set_exception(Unreachable("the agent is gone"))

    def _dispatch(self, message: TopAsked | TopReplied | TopFailed) -> None:
        pending = self._replies.get(message.number)
        if pending is None or pending.done():
            return
        match message:
            case TopReplied():
                pending.set_result(message.reply)
            case TopFailed(reason=reason, cause=cause):
                is_away = reason == UNREACHABLE
                pending.set_exception(Unreachable(cause) if is_away else InferenceRefused(cause, reason=reason))


class TopRelay:
    """Agent's end: requests of the inference process to the server's client.

    Attributes:
        ask: Client for upper halves on the server; None while there is no connection.
    """

    def __init__(self, ask: AskTop | None = None) -> None:
        self.ask = ask

    async def run(self, agent_socket: socket.socket) -> None:
        """Serve requests of the inference process until it closes."""
        asking = BackgroundTasks()
        try:
            reader, writer = await asyncio.open_connection(sock=agent_socket)
            try:
                while (message := await read_frame(reader, _decoder)) is not None:
                    if isinstance(message, TopAsked):
                        asking.start(self._relay(message, writer), "relay")
            finally:
                await asking.close()
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()
        except (OSError, msgspec.DecodeError) as error:
            log.warning("relay of upper halves failed: %s", error)

    async def _relay(self, request: TopAsked, writer: asyncio.StreamWriter) -> None:
        answer: TopReplied | TopFailed
        try:
            if self.ask is None:
                raise Unreachable("there is no connection to the site's broker yet")
            reply = await self.ask(request.half, [memoryview(request.features)], request.deadline_s)
            answer = TopReplied(request.number, reply)
        except InferenceRefused as error:
            answer = TopFailed(request.number, error.reason, str(error))
        except FieldFleetError as error:  # the requester waits for a reply in any case
            answer = TopFailed(request.number, UNREACHABLE, str(error))
        writer.write(encode_frame(answer))
