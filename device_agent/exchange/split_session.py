"""A split session as it travels: one step's features up, their gradient down, whatever becomes of the link meanwhile.

The device drives. It offers its step's features, again when it hears nothing, when the server is back, and when it may
have missed the answer; an offer changes nothing that it has changed before. The server asks for what of them lacks, or
answers with the gradient, or says that the step went on without this device.
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
"""After so many in a row the server may have forgotten what it was sending: it is offered the features again."""


class Exchange(Protocol):
    """A device's way to its server at every step of a split session: features up, and their gradient down."""

    @property
    def carried(self) -> tuple[int, int]:
        """Bytes of frames so far, features up and gradients down."""

    def __call__(self, step: int, parts: Sequence[memoryview]) -> Awaitable[memoryview | Missed]:
        """Return the payload that answers one step's; in memory that is the caller's, as `parts` is until then.

        Raises:
            SessionLost: The server knows nothing of the session any more.
        """


@dataclass
class Splitting:
    """This device's way of exchanging payloads; what it learns of the link outlives a session.

    Attributes:
        policy: How gradients are received; its frames are the largest that features go out in, too.
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
        """Listen to the server while the block lasts."""
        if self._pace is None:
            self._pace = self.policy.pace(self.clock())
        patterns = topic(self.site, self.device, "gradient"), topic(self.site, SERVER, "status")
        async with self.transport.subscribe(*patterns) as inbox:
            yield _Session(self, task, inbox, self._pace)


@dataclass
class _Session:
    """One session; one step of it at a time."""

    way: Splitting
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
    def carried(self) -> tuple[int, int]:
        return self.features_bytes, self.gradient_bytes

    async def __call__(self, step: int, parts: Sequence[memoryview]) -> memoryview | Missed:
        frame_bytes = chunks.largest_frame(self.way.policy.frame_bytes, self.way.transport.max_payload_bytes)
        self._step, self._up, self._down = step, Sender.of_parts(parts, frame_bytes), None
        self._patience_s, self._silences = FIRST_PATIENCE_S, 0
        for delivery in self.inbox.drain():  # perhaps the step went on without us while we computed
            if (answer := await self._heard(delivery)) is not None:
                return answer
        await self._offer(self.room)
        while True:
            try:
                async with backports.timeout(self._left_s()):
                    delivery = await anext(self.inbox)
            except TimeoutError:
                await self._silence()
                continue
            if (answer := await self._heard(delivery)) is not None:
                return answer

    def _left_s(self) -> float:
        now = self.way.clock()
        return self._down.remaining_s(now) if self._down else max(0.0, self._due - now)

    async def _silence(self) -> None:
        """Ask again for what lacks of the gradient; where that does not help, offer again, ever more rarely."""
        self._silences += 1
        if self._down:
            self._down.time_out(self.way.clock())
            await self._ask(self._down)
            if self._silences < SILENCES:
                return
        self._patience_s = min(2 * self._patience_s, LAST_PATIENCE_S)
        await self._offer()

    async def _offer(self, unasked: Room = Room()) -> None:  # noqa: B008 - a constant
        """Say which features are here, and send at once what the server has room for."""
        assert self._up
        self._due = self.way.clock() + self._patience_s * self.way.jitter.uniform(0.75, 1.25)
        pushed, frames = self._up.push(unasked, self.way.transport.max_payload_bytes)
        header = Features(
            run=self.task.run,
            round=self.task.round,
            device=self.way.device,
            start=self.task.params.digest,
            step=self._step,
            params=self._up.transfer,
            pushed=pushed,
            room=push_credit(self.pace, self.way.policy.window),
        )
        name = topic(self.way.site, self.way.device, "features")
        telling = self.way.transport.publish(name, wire.encode(header))
        told, sent = await asyncio.gather(telling, self._send(frames), return_exceptions=True)  # in this order
        for ended in (told, sent):
            if isinstance(ended, Unreachable):
                log.debug("offer of step %d waits: %s", self._step, ended)
            elif ended is not None:
                raise ended

    async def _send(self, frames: Iterable[bytes]) -> None:
        for frame in frames:
            await self.way.transport.publish(topic(self.way.site, self.way.device, "features"), frame, assured=False)
            self.features_bytes += len(frame)

    async def _ask(self, down: Receiver[MemorySink]) -> None:
        if want := down.want():
            try:
                name = topic(self.way.site, self.way.device, "features")
                await self.way.transport.publish(name, wire.encode(want), assured=False)
            except Unreachable as error:
                log.debug("not asked, the next silence does: %s", error)

    async def _heard(self, delivery: Delivery) -> memoryview | Missed | None:
        """Do what a delivery says; return the step's answer if it brings it."""
        name, data = delivery
        try:
            if chunks.is_frame(data):
                return await self._take(data)
            message = wire.decode(data)
            if parse_channel(name) == "status":
                if isinstance(message, Status) and message.online:
                    await self._server_is_here()
                return None
            return await self._told(message)
        except WireError as error:
            log.warning("step %d: dropped: %s", self._step, error)
        return None

    async def _told(self, message: AnyMessage) -> Missed | None:
        assert self._up
        match message:
            case Want() if message.digest == self._up.transfer.digest:
                self._patience_s = FIRST_PATIENCE_S  # it is there
                self._due = self.way.clock() + self._patience_s
                try:
                    await self._send(self._up.answer(message, self.way.transport.max_payload_bytes))
                except Unreachable as error:
                    log.debug("frames not sent, the server will ask again: %s", error)
            case Gradient() if self._is_ours(message) and message.answers == self._up.transfer.digest:
                await self._announced(message)
            case Skip() if self._is_ours(message) and message.offered == self._step:
                if message.step < self._step:
                    raise SessionLost(f"the server begins round {self.task.round} anew, at step {message.step}")
                self.room = Room()  # what goes unasked to a step that may be over too is sent in vain
                return Missed(message.step - self._step) if message.step > self._step else None
        return None

    def _is_ours(self, message: Gradient | Skip) -> bool:
        """Tell whether a message is of this session, and not of the same round of another time."""
        told = message.run, message.round, message.device, message.start
        return told == (self.task.run, self.task.round, self.way.device, self.task.params.digest)

    async def _announced(self, message: Gradient) -> None:
        now = self.way.clock()
        self.room = message.room
        if self._down and self._down.transfer.digest == message.params.digest:
            self._down.note_new_offer(message.pushed, now)
        else:
            policy = self.way.policy
            self._down = Receiver(message.params, MemorySink, policy, self.pace, now, pushed=message.pushed)
        await self._ask(self._down)

    async def _take(self, data: bytes) -> memoryview | None:
        down, frame = self._down, chunks.decode(data)
        if down is None or frame.digest != down.transfer.digest:
            return None
        self.gradient_bytes += len(data)
        if down.take(frame, self.way.clock()):
            self._silences = 0
        if not down.complete:
            await self._ask(down)
            return None
        self._down = None  # one whose digest fails is offered again
        return down.finish()

    async def _server_is_here(self) -> None:
        """Offer again when the server is back, or we are; the first word of it is the one that the broker has kept."""
        if self._heard_server:
            await self._offer()
        self._heard_server = True
