"""Split-inference client: the server runs the upper layers.

One request is in flight, a few are queued. The device drives, as in a split session: it offers a request's features,
again after a silence and when the server is back, and sends what the server requests of them. A repeated request
computes the same result. A missing connection, an ended server process and a server that missed a deadline are reported
at once, without another wait, so that the caller can fall back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

from device_agent.inference.collaborative.interface import Half, TopReply
from shared.errors import InferenceRefused, Unreachable, WireError
from shared.protocol import wire
from shared.protocol.inference.collaborative import (
    FROM_DEVICE,
    MAX_DEADLINE_S,
    TO_DEVICE,
    TopAnswer,
    TopRequest,
    check_answer,
)
from shared.protocol.messages import Message, Room, Status, Want
from shared.protocol.topics import TOPS, parse_channel, topic
from shared.runtime import backports
from shared.runtime.clock import Clock
from shared.transfer import frames
from shared.transfer.sender import Sender
from shared.transport.base import Inbox, Transport

log = logging.getLogger(__name__)

MOST_WAITING = 8
"""Queued requests; the next one is refused."""
FIRST_PATIENCE_S, LAST_PATIENCE_S = 0.5, 4.0
"""Silence after which a request is offered again; doubles each time."""
FIRST_BACKOFF_S, LAST_BACKOFF_S = 1.0, 30.0
"""Pause after a missed deadline during which the server is not asked; doubles, and ends when a server comes online."""


@dataclass
class RemoteTop:
    """Runs features through the server's half; `run` must be active meanwhile.

    Attributes:
        instance: Identifier unique among this device's processes.
        clock: Monotonic clock, in seconds.
        frame_bytes: Most bytes of features in one message.
        jitter: Spreads the offers of a fleet in time.
    """

    transport: Transport
    site: str
    device: str
    instance: str
    clock: Clock
    frame_bytes: int
    jitter: Random = field(default_factory=Random)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _waiting: int = 0
    _replies: asyncio.Queue[tuple[Message, int]] | None = None
    server_status: Status | None = None
    _room: Room = field(default_factory=Room)
    _number: int = 0
    _backoff_s: float = 0.0
    _backoff_until: float = 0.0

    async def __call__(self, half: Half, parts: Sequence[memoryview], deadline_s: float) -> TopReply:
        """Run the server's half on features.

        Args:
            parts: Payload of the features; must not change meanwhile.
            deadline_s: Seconds until the caller gives up; at most `MAX_DEADLINE_S`.

        Raises:
            Unreachable: No connection, no server, or no answer in time.
            InferenceRefused: The server refused, or too many requests are queued.
        """
        deadline_s, now = min(deadline_s, MAX_DEADLINE_S), self.clock()
        if why := self._find_outage(now):
            raise Unreachable(why)
        if self._waiting >= MOST_WAITING:
            why = f"{MOST_WAITING} requests for the server's half are pending already"
            raise InferenceRefused(why, reason="busy")
        is_started = False
        try:
            async with backports.timeout(deadline_s):
                self._waiting += 1
                try:
                    await self._turn.acquire()
                finally:
                    self._waiting -= 1
                try:
                    is_started = True
                    return await self._exchange(half, parts, now + deadline_s)
                finally:
                    self._turn.release()
        except TimeoutError:
            if is_started:
                self._backoff_s = min(LAST_BACKOFF_S, max(FIRST_BACKOFF_S, 2 * self._backoff_s))
                self._backoff_until = self.clock() + self._backoff_s
            raise Unreachable(f"the server's half did not answer within {deadline_s:g} s") from None

    def _find_outage(self, now: float) -> str:
        """Return why the server cannot be asked now; empty if it may answer."""
        if self.server_status is not None and not self.server_status.online:
            return "the process that serves the server's half has ended"
        if now < self._backoff_until:
            return f"the server's half did not answer recently; next attempt in {self._backoff_until - now:.1f} s"
        return ""

    async def run(self) -> None:
        """Receive the server's messages until cancelled."""
        patterns = topic(self.site, self.device, TO_DEVICE), topic(self.site, TOPS, "status")
        async with self.transport.subscribe(*patterns) as inbox:
            await self._receive(inbox)

    async def _receive(self, inbox: Inbox) -> None:
        async for name, data in inbox:
            try:
                message = wire.decode(data)
                if isinstance(message, TopAnswer):
                    check_answer(message)
            except WireError as error:
                log.warning("dropped: %s", error)
                continue
            if parse_channel(name) == "status":
                if not isinstance(message, Status):
                    continue
                self.server_status = message
                if message.online:
                    self._backoff_s = self._backoff_until = 0.0
            if self._replies:
                self._replies.put_nowait((message, len(data)))

    async def _exchange(self, half: Half, parts: Sequence[memoryview], due: float) -> TopReply:
        """Offer the features and send what is requested, until the answer arrives."""
        self._number += 1
        most = frames.largest_frame(self.frame_bytes, self.transport.max_payload_bytes)
        exchange = _Exchange(self, half, due, self._number, Sender.of_parts(parts, most), self.clock())
        replies = self._replies = asyncio.Queue[tuple[Message, int]]()
        try:
            await exchange.offer(self._room)  # raises without a connection
            while (answer := await exchange.receive(replies)) is None:
                pass
        finally:
            self._replies = None
        self._room = answer.room
        if answer.reason:
            raise InferenceRefused(answer.detail or answer.reason, reason=answer.reason)
        self._backoff_s = 0.0
        took_s = self.clock() - exchange.began
        return TopReply(answer.outputs, answer.timing, took_s, exchange.bytes_up, exchange.bytes_down)


@dataclass
class _Exchange:
    """One request in flight."""

    client: RemoteTop
    half: Half
    due: float
    number: int
    sender: Sender
    began: float
    offer_at: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    _patience_s: float = FIRST_PATIENCE_S

    async def offer(self, unasked: Room) -> None:
        """Announce the features and send at once as much as the server has room for."""
        now = self.client.clock()
        self.offer_at = now + self._patience_s * self.client.jitter.uniform(0.75, 1.25)
        pushed, pieces = self.sender.push(unasked, self.client.transport.max_payload_bytes)
        request = TopRequest(
            device=self.client.device,
            instance=self.client.instance,
            number=self.number,
            name=self.half.name,
            version=self.half.version,
            parameters=self.half.parameters,
            params=self.sender.transfer,
            pushed=pushed,
            deadline_s=max(1e-3, self.due - now),
        )
        offering = self._publish(wire.encode(request), assured=True)
        announced, sent = await asyncio.gather(offering, self._push(pieces), return_exceptions=True)  # in this order
        for error in (announced, sent):
            if error is not None:
                raise error

    async def _push(self, pieces: Iterable[bytes]) -> None:
        for piece in pieces:
            await self._publish(piece)

    async def receive(self, replies: asyncio.Queue[tuple[Message, int]]) -> TopAnswer | None:
        """Handle the next message; offer again after a silence, with growing pauses. Return the answer if it came."""
        try:
            async with backports.timeout(max(0.0, self.offer_at - self.client.clock())):
                message, size = await replies.get()
        except TimeoutError:
            self._patience_s = min(2 * self._patience_s, LAST_PATIENCE_S)
            with suppress(Unreachable):
                await self.offer(Room())  # the server requests what it lacks
            return None
        return await self._handle(message, size)

    async def _handle(self, message: Message, size: int) -> TopAnswer | None:
        """Handle a message; return it if it is the answer.

        Raises:
            Unreachable: The server's process has ended.
        """
        match message:
            case Status() if not message.online:
                raise Unreachable("the process that serves the server's half has ended")
            case Status():
                with suppress(Unreachable):
                    await self.offer(Room())
            case Want() if message.digest == self.sender.transfer.digest:
                self.bytes_down += size
                await self._send(message)
            case TopAnswer() if self._matches(message):
                self.bytes_down += size
                return message
        return None

    def _matches(self, answer: TopAnswer) -> bool:
        identity = answer.device, answer.instance, answer.number, answer.answers
        return identity == (self.client.device, self.client.instance, self.number, self.sender.transfer.digest)

    async def _send(self, want: Want) -> None:
        self._patience_s = FIRST_PATIENCE_S  # the server is online
        self.offer_at = self.client.clock() + self._patience_s
        try:
            await self._push(self.sender.answer(want, self.client.transport.max_payload_bytes))
        except (Unreachable, WireError) as error:
            log.debug("features not sent, they will be asked for again: %s", error)

    async def _publish(self, data: bytes, *, assured: bool = False) -> None:
        name = topic(self.client.site, self.client.device, FROM_DEVICE)
        await self.client.transport.publish(name, data, assured=assured)
        self.bytes_up += len(data)
