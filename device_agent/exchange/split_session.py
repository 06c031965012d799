"""Split session: send features and receive gradients, despite link outages.

The device drives. It offers a step's features, again after a silence, when the server is back, and when it may have
missed the answer; a repeated offer has no further effect. The server requests the missing frames, answers with the
gradient, or reports that the step continued without this device.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from shared.errors import SessionLost, Unreachable, WireError
from shared.protocol import wire
from shared.protocol.messages import Features, Gradient, Missed, Room, Skip, Status, Task, Want
from shared.protocol.topics import SERVER, parse_channel, topic
from shared.protocol.wire import AnyMessage
from shared.runtime import backports
from shared.runtime.clock import Clock
from shared.transfer import frames as chunks
from shared.transfer.in_memory import MemorySink
from shared.transfer.pace import Pace
from shared.transfer.receiver import Policy, Receiver, push_credit
from shared.transfer.sender import Sender
from shared.transport.base import Delivery, Inbox, Transport

log = logging.getLogger(__name__)

FIRST_PATIENCE_S, LAST_PATIENCE_S = 2.0, 30.0
SILENCES = 2
"""Consecutive silences after which the features are offered again: the server may have forgotten its gradient."""


class Exchange(Protocol):
    """Exchanges features and their gradient with the server at every step of a split session."""

    @property
    def bytes_so_far(self) -> tuple[int, int]:
        """Bytes of frames so far: features up, gradients down."""

    def __call__(self, step: int, parts: Sequence[memoryview]) -> Awaitable[memoryview | Missed]:
        """Return the payload that answers a step; the caller owns it, and must not change `parts` until then.

        Raises:
            SessionLost: The server no longer knows the session.
        """


@dataclass
class SplitSessions:
    """Opens split sessions with the server; link measurements are reused between sessions.

    Attributes:
        policy: Limits for receiving gradients; its frame size also limits the features' frames.
        jitter: Spreads the offers of a fleet in time; seeded in replay.
    """

    transport: Transport
    site: str
    device: str
    clock: Clock
    policy: Policy
    jitter: Random = field(default_factory=Random)
    _pace: Pace | None = None

    @asynccontextmanager
    async def session(self, task: Task) -> AsyncIterator[Exchange]:
        """Listen to the server while the block runs."""
        if self._pace is None:
            self._pace = self.policy.pace(self.clock())
        patterns = topic(self.site, self.device, "gradient"), topic(self.site, SERVER, "status")
        async with self.transport.subscribe(*patterns) as inbox:
            yield _Session(self, task, inbox, self._pace)


@dataclass
class _Session:
    """One session; processes one step at a time."""

    sessions: SplitSessions
    task: Task
    inbox: Inbox
    pace: Pace
    room: Room = field(default_factory=Room)
    features_bytes: int = 0
    gradient_bytes: int = 0
    _step: int = 0
    _up: Sender | None = None
    _down: Receiver[MemorySink] | None = None
    _due: float = 0.0
    _patience_s: float = FIRST_PATIENCE_S
    _silences: int = 0
    _heard_server: bool = False

    @property
    def bytes_so_far(self) -> tuple[int, int]:
        return self.features_bytes, self.gradient_bytes

    async def __call__(self, step: int, parts: Sequence[memoryview]) -> memoryview | Missed:
        frame_bytes = chunks.largest_frame(self.sessions.policy.frame_bytes, self.sessions.transport.max_payload_bytes)
        self._step, self._up, self._down = step, Sender.of_parts(parts, frame_bytes), None
        self._patience_s, self._silences = FIRST_PATIENCE_S, 0
        for delivery in self.inbox.drain():  # the step may have continued without this device meanwhile
            if (answer := await self._handle_delivery(delivery)) is not None:
                return answer
        await self._offer(self.room)
        while True:
            try:
                async with backports.timeout(self._wait_s()):
                    delivery = await anext(self.inbox)
            except TimeoutError:
                await self._handle_silence()
                continue
            if (answer := await self._handle_delivery(delivery)) is not None:
                return answer

    def _wait_s(self) -> float:
        now = self.sessions.clock()
        return self._down.remaining_s(now) if self._down else max(0.0, self._due - now)

    async def _handle_silence(self) -> None:
        """Request missing frames of the gradient again; if that does not help, offer again, with growing pauses."""
        self._silences += 1
        if self._down:
            self._down.time_out(self.sessions.clock())
            await self._ask(self._down)
            if self._silences < SILENCES:
                return
        self._patience_s = min(2 * self._patience_s, LAST_PATIENCE_S)
        await self._offer()

    async def _offer(self, unasked: Room = Room()) -> None:  # noqa: B008 - a constant
        """Announce the features and send at once as much as the server has room for."""
        assert self._up
        self._due = self.sessions.clock() + self._patience_s * self.sessions.jitter.uniform(0.75, 1.25)
        pushed, frames = self._up.push(unasked, self.sessions.transport.max_payload_bytes)
        header = Features(
            run=self.task.run,
            round=self.task.round,
            device=self.sessions.device,
            start=self.task.params.digest,
            step=self._step,
            params=self._up.transfer,
            pushed=pushed,
            room=push_credit(self.pace, self.sessions.policy.window),
        )
        offering = self._publish(wire.encode(header), assured=True)
        announced, sent = await asyncio.gather(offering, self._send(frames), return_exceptions=True)  # in this order
        for error in (announced, sent):
            if isinstance(error, Unreachable):
                log.debug("offer of step %d waits: %s", self._step, error)
            elif error is not None:
                raise error

    async def _send(self, frames: Iterable[bytes]) -> None:
        for frame in frames:
            await self._publish(frame)
            self.features_bytes += len(frame)

    async def _publish(self, data: bytes, *, assured: bool = False) -> None:
        name = topic(self.sessions.site, self.sessions.device, "features")
        await self.sessions.transport.publish(name, data, assured=assured)

    async def _ask(self, down: Receiver[MemorySink]) -> None:
        if want := down.want():
            try:
                await self._publish(wire.encode(want))
            except Unreachable as error:
                log.debug("request not sent, repeated after the next silence: %s", error)

    async def _handle_delivery(self, delivery: Delivery) -> memoryview | Missed | None:
        """Handle a delivery; return the step's answer if it completes it."""
        name, data = delivery
        try:
            if chunks.is_frame(data):
                return await self._take_frame(data)
            message = wire.decode(data)
            if parse_channel(name) == "status":
                if isinstance(message, Status) and message.online:
                    await self._handle_server_online()
                return None
            return await self._handle_message(message)
        except WireError as error:
            log.warning("step %d: dropped: %s", self._step, error)
        return None

    async def _handle_message(self, message: AnyMessage) -> Missed | None:
        assert self._up
        match message:
            case Want() if message.digest == self._up.transfer.digest:
                self._patience_s = FIRST_PATIENCE_S  # the server is online
                self._due = self.sessions.clock() + self._patience_s
                try:
                    await self._send(self._up.answer(message, self.sessions.transport.max_payload_bytes))
                except Unreachable as error:
                    log.debug("frames not sent, the server will ask again: %s", error)
            case Gradient() if self._is_ours(message) and message.answers == self._up.transfer.digest:
                await self._start_gradient(message)
            case Skip() if self._is_ours(message) and message.offered == self._step:
                if message.step < self._step:
                    raise SessionLost(f"the server restarts round {self.task.round} at step {message.step}")
                self.room = Room()  # the next step may be over too: send nothing unrequested
                return Missed(message.step - self._step) if message.step > self._step else None
        return None

    def _is_ours(self, message: Gradient | Skip) -> bool:
        """Return True for a message of this session, not of an earlier attempt at the same round."""
        identity = message.run, message.round, message.device, message.start
        return identity == (self.task.run, self.task.round, self.sessions.device, self.task.params.digest)

    async def _start_gradient(self, message: Gradient) -> None:
        now = self.sessions.clock()
        self.room = message.room
        if self._down and self._down.transfer.digest == message.params.digest:
            self._down.note_new_offer(message.pushed, now)
        else:
            policy = self.sessions.policy
            self._down = Receiver(message.params, MemorySink, policy, self.pace, now, pushed=message.pushed)
        await self._ask(self._down)

    async def _take_frame(self, data: bytes) -> memoryview | None:
        down, frame = self._down, chunks.decode(data)
        if down is None or frame.digest != down.transfer.digest:
            return None
        self.gradient_bytes += len(data)
        if down.take(frame, self.sessions.clock()):
            self._silences = 0
        if not down.complete:
            await self._ask(down)
            return None
        self._down = None  # a damaged gradient is offered again
        return down.finish()

    async def _handle_server_online(self) -> None:
        """Offer again when the connection or the server is back; the first message is the broker's retained one."""
        if self._heard_server:
            await self._offer()
        self._heard_server = True
