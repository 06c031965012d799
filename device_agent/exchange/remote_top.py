"""The server's half of a network, asked from here: one request in flight, the others wait in turn, and not many.

The device drives, as in a split session: it offers a request's features, again when it hears nothing and when the
server is back, and sends of them what it is asked for. Asked twice, the server computes the same. Where there is no
connection, where the server's process has ended, or where it has let a request's time pass, that is said at once and
not after another wait, so that whoever asks may fall back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

from device_agent.inference.collaborative.interface import Half, TopReply
from shared.errors import FieldFleetError, InferenceRefused, Unreachable, WireError
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
from shared.runtime.executor import background
from shared.transfer import frames
from shared.transfer.sender import Sender
from shared.transport.base import Inbox, Transport

log = logging.getLogger(__name__)

MOST_WAITING = 8
"""Requests that wait for the one in flight; the next is refused."""
FIRST_PATIENCE_S, LAST_PATIENCE_S = 0.5, 4.0
"""Until a request is offered again that nothing is heard of; it doubles."""
FIRST_REST_S, LAST_REST_S = 1.0, 30.0
"""For which a server that let a request's time pass is not asked again; it doubles, and ends when one is back."""


@dataclass
class _Asked:
    """A request that waits, or is in flight."""

    half: Half
    parts: Sequence[memoryview]
    due: float
    reply: asyncio.Future[TopReply]
    is_begun: bool = False


@dataclass
class RemoteTop:
    """This device's way of having the server's half run. `run` is to be under way while it is asked.

    Attributes:
        instance: A word that no other process of this device has.
        clock: Monotonic seconds.
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
    _queue: asyncio.Queue[_Asked] = field(default_factory=lambda: asyncio.Queue(MOST_WAITING))
    _heard: asyncio.Queue[tuple[Message, int]] | None = None
    _server: Status | None = None
    _room: Room = field(default_factory=Room)
    _number: int = 0
    _rest_s: float = 0.0
    _rest_until: float = 0.0

    async def __call__(self, half: Half, parts: Sequence[memoryview], deadline_s: float) -> TopReply:
        """Have the server's half run on features.

        Args:
            parts: The payload of features, which must stay as they are.
            deadline_s: Seconds after which nobody waits for it any more; at most `MAX_DEADLINE_S`.

        Raises:
            Unreachable: There is no connection, or no server; or no answer came in time.
            InferenceRefused: The server says why not; or too many wait here already.
        """
        deadline_s, now = min(deadline_s, MAX_DEADLINE_S), self.clock()
        if why := self._why_away(now):
            raise Unreachable(why)
        asked = _Asked(half, parts, now + deadline_s, asyncio.get_running_loop().create_future())
        try:
            self._queue.put_nowait(asked)
        except asyncio.QueueFull:
            why = f"{MOST_WAITING} requests wait for the server's half already"
            raise InferenceRefused(why, reason="busy") from None
        try:
            async with backports.timeout(deadline_s):
                return await asked.reply
        except TimeoutError:
            if asked.is_begun:
                self._rest_s = min(LAST_REST_S, max(FIRST_REST_S, 2 * self._rest_s))
                self._rest_until = self.clock() + self._rest_s
            raise Unreachable(f"the server's half did not answer within {deadline_s:g} s") from None

    def _why_away(self, now: float) -> str:
        """Return why nobody needs to be asked now; empty where somebody may answer."""
        if self._server is not None and not self._server.online:
            return "the process that serves the server's half has ended"
        if now < self._rest_until:
            return f"the server's half did not answer lately; it is asked again in {self._rest_until - now:.1f} s"
        return ""

    async def run(self) -> None:
        """Do requests in turn until cancelled."""
        patterns = topic(self.site, self.device, TO_DEVICE), topic(self.site, TOPS, "status")
        async with self.transport.subscribe(*patterns) as inbox, background(self._listen(inbox)):
            while True:
                asked = await self._queue.get()
                if not asked.reply.done():
                    await self._do(asked)

    async def _listen(self, inbox: Inbox) -> None:
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
                self._server = message
                if message.online:
                    self._rest_s = self._rest_until = 0.0
            if self._heard:
                self._heard.put_nowait((message, len(data)))

    async def _do(self, asked: _Asked) -> None:
        """Do one request; give it up when nobody waits for it any more."""
        asked.is_begun, self._heard = True, asyncio.Queue()
        exchanging = asyncio.create_task(self._exchange(asked, self._heard), name="ask the top")
        asked.reply.add_done_callback(lambda _: exchanging.cancel())
        try:
            await asyncio.wait({exchanging})
        finally:
            exchanging.cancel()
            self._heard = None
        if exchanging.cancelled() or asked.reply.done():
            return
        error = exchanging.exception()
        if error is None:
            self._rest_s = 0.0
            asked.reply.set_result(exchanging.result())
        elif isinstance(error, FieldFleetError):
            asked.reply.set_exception(error)
        else:
            raise error

    async def _exchange(self, asked: _Asked, heard: asyncio.Queue[tuple[Message, int]]) -> TopReply:
        """Offer the features, send what is asked for, until the answer."""
        self._number += 1
        most = frames.largest_frame(self.frame_bytes, self.transport.max_payload_bytes)
        exchange = _Exchange(self, asked, self._number, Sender.of_parts(asked.parts, most), self.clock())
        await exchange.offer(self._room)  # without a connection it ends here
        while True:
            try:
                async with backports.timeout(max(0.0, exchange.offer_at - self.clock())):
                    message, size = await heard.get()
            except TimeoutError:
                await exchange.offer_again()
                continue
            if (answer := await exchange.hear(message, size)) is None:
                continue
            self._room = answer.room
            if answer.reason:
                raise InferenceRefused(answer.detail or answer.reason, reason=answer.reason)
            took_s = self.clock() - exchange.began
            return TopReply(answer.outputs, answer.timing, took_s, exchange.bytes_up, exchange.bytes_down)


@dataclass
class _Exchange:
    """One request on its way."""

    way: RemoteTop
    asked: _Asked
    number: int
    sender: Sender
    began: float
    offer_at: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    _patience_s: float = FIRST_PATIENCE_S

    async def offer(self, unasked: Room) -> None:
        """Say which features are here, and send at once what the server has room for."""
        now = self.way.clock()
        self.offer_at = now + self._patience_s * self.way.jitter.uniform(0.75, 1.25)
        pushed, pieces = self.sender.push(unasked, self.way.transport.max_payload_bytes)
        half = self.asked.half
        request = TopRequest(
            device=self.way.device,
            instance=self.way.instance,
            number=self.number,
            name=half.name,
            version=half.version,
            parameters=half.parameters,
            params=self.sender.transfer,
            pushed=pushed,
            deadline_s=max(1e-3, self.asked.due - now),
        )
        telling = self._publish(wire.encode(request), assured=True)
        told, sent = await asyncio.gather(telling, self._push(pieces), return_exceptions=True)  # in this order
        for ended in (told, sent):
            if ended is not None:
                raise ended

    async def _push(self, pieces: Iterable[bytes]) -> None:
        for piece in pieces:
            await self._publish(piece)

    async def offer_again(self) -> None:
        """Say it anew after a silence, ever more rarely; what of it lacks is asked for."""
        self._patience_s = min(2 * self._patience_s, LAST_PATIENCE_S)
        with suppress(Unreachable):
            await self.offer(Room())

    async def hear(self, message: Message, size: int) -> TopAnswer | None:
        """Do what a message says; return the answer if it is that.

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
            case TopAnswer() if self._is_ours(message):
                self.bytes_down += size
                return message
        return None

    def _is_ours(self, answer: TopAnswer) -> bool:
        told = answer.device, answer.instance, answer.number, answer.answers
        return told == (self.way.device, self.way.instance, self.number, self.sender.transfer.digest)

    async def _send(self, want: Want) -> None:
        self._patience_s = FIRST_PATIENCE_S  # it is there
        self.offer_at = self.way.clock() + self._patience_s
        try:
            await self._push(self.sender.answer(want, self.way.transport.max_payload_bytes))
        except (Unreachable, WireError) as error:
            log.debug("features not sent, they will be asked for again: %s", error)

    async def _publish(self, data: bytes, *, assured: bool = False) -> None:
        name = topic(self.way.site, self.way.device, FROM_DEVICE)
        await self.way.transport.publish(name, data, assured=assured)
        self.bytes_up += len(data)
