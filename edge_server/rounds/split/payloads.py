"""Payloads of split steps: each device's features come in, asked for until they are whole; its gradient goes out.

Features lie in memory, and both in the sessions of the devices. A gradient's header says how much of the next features
may come unasked, which is why both ways are one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from edge_server.plan.server_config import LinkConfig
from edge_server.rounds.broadcast import WishBudget
from edge_server.rounds.split.device_session import DeviceSession
from shared.errors import Unreachable, WireError
from shared.protocol import wire
from shared.protocol.messages import BLOCK_BYTES, Features, Gradient, Message, Room, Want
from shared.protocol.topics import topic
from shared.runtime.clock import Clock
from shared.transfer import frames
from shared.transfer.in_memory import MemorySink
from shared.transfer.pace import Pace
from shared.transfer.receiver import Expected, Policy, Receiver, room
from shared.transfer.sender import Sender
from shared.transport.base import Transport

log = logging.getLogger(__name__)


@dataclass
class StepPayloads:
    """What is sent in one round's steps, either way.

    Attributes:
        sessions: Of the round's devices.
        paces: How fast features come from each device; outlives the step, and the round.
    """

    site: str
    transport: Transport
    clock: Clock
    link: LinkConfig
    paces: dict[str, Pace]
    sessions: Mapping[str, DeviceSession]
    _policy: Policy = field(init=False)
    _expected: dict[str, Expected] = field(default_factory=dict)
    _budgets: dict[str, tuple[bytes, WishBudget]] = field(default_factory=dict)
    _turns: asyncio.Queue[DeviceSession] = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        """Take the limits of features from the link's."""
        self._policy = self.link.policy(self.link.max_features_mb << 20)

    async def begin(self, session: DeviceSession, offer: Features) -> None:
        """Ask for the features of an offer, or for what is missing of them.

        Raises:
            WireError: There are more than this server takes; no memory was taken for them.
        """
        now, receiver = self.clock(), session.receiver
        session.offer, session.features = offer, None
        if receiver and receiver.transfer == offer.params:
            receiver.offered_again(offer.pushed, now)
        else:
            session.receiver = None
            pace = self.pace(session.device)
            session.receiver = Receiver(offer.params, MemorySink, self._policy, pace, now, pushed=offer.pushed)
        await self._ask(session)

    async def take(self, session: DeviceSession, data: bytes) -> bool:
        """Take a frame of features; tell whether anything in it was new, or was asked for.

        Raises:
            WireError: It is damaged or does not fit the offer.
        """
        frame, receiver = frames.decode(data), session.receiver
        is_expected = session.device in self._expected and self._expected[session.device].take(frame.data.nbytes)
        if receiver is None or frame.digest != receiver.transfer.digest:
            self.pace(session.device).passed(frame.data.nbytes)
            return is_expected  # of a step that is over
        is_new = receiver.take(frame, self.clock())
        await self._ask(session)
        return is_new or is_expected

    def expect_push(self, session: DeviceSession) -> None:
        """Note that a device has been told how much of its next features it may send unasked."""
        self._expect(session.device).ask((0, self._room(session.device).blocks))

    def _room(self, device: str) -> Room:
        return room(self.pace(device), self.window)

    def _expect(self, device: str) -> Expected:
        """Return the account of what a device was asked for."""
        return self._expected.setdefault(device, self._policy.expected())

    async def ask_anew(self, session: DeviceSession) -> None:
        """Ask a device that has connected anew for all that is missing: what was under way is lost."""
        if session.receiver:
            session.receiver.lost(self.clock())
            await self._ask(session)

    async def retry(self, session: DeviceSession, error: WireError) -> bool:
        """Ask for features anew if they were damaged on their way; tell whether there is hope."""
        if session.receiver is None or error.reason != "digest" or session.receiver.is_hopeless:
            return False
        await self._ask(session)
        return True

    async def ask_again(self) -> None:
        """Ask anew for what does not come."""
        for session in self.coming():
            if session.receiver and not session.receiver.left_s(self.clock()):
                session.receiver.gave_up(self.clock())
                await self._ask(session)

    def coming(self) -> list[DeviceSession]:
        """Return the sessions whose features are on their way, or not read yet."""
        return [session for session in self.sessions.values() if session.receiver]

    def pace(self, device: str) -> Pace:
        """Return how fast frames come from a device; small ones first, since its link is not known yet."""
        if device not in self.paces:
            self.paces[device] = self._policy.pace(self.clock())
        return self.paces[device]

    @property
    def frame_bytes(self) -> int:
        """Bytes of a gradient that go into a frame now."""
        return frames.largest_frame(self.link.frame_bytes, self.transport.max_payload_bytes)

    @property
    def window(self) -> int:
        """Frames that one device may have under way; all together have no more than the budget."""
        return self._policy.share(sum(1 for session in self.sessions.values() if session.receiver))

    async def _ask(self, session: DeviceSession) -> None:
        if session.receiver and (want := session.receiver.want(self.window)):
            self._expect(session.device).ask(*want.ranges)
            await self.tell(session.device, want, assured=False)

    async def tell(self, device: str, message: Message, *, assured: bool = True) -> None:
        """Send a message to a device; what does not reach it, it will cause again by another offer.

        Args:
            assured: Whether the broker is to acknowledge it.
        """
        try:
            await self.transport.publish(topic(self.site, device, "gradient"), wire.encode(message), assured=assured)
        except Unreachable as error:
            log.debug("not sent, %s will offer again: %s", device, error)

    async def announce(self, session: DeviceSession, offer: Features) -> None:
        """Announce a device's gradient, and send at once what it has room for.

        Args:
            session: Of the device; if it has no gradient of that step, nothing is sent: it is being computed.
            offer: The features that it answers.
        """
        gradient = session.answers.of_step(offer.step)
        if gradient is None:
            return
        session.send(gradient)
        pieces = [] if session.waiting else gradient.unasked(offer.room, self.transport.max_payload_bytes)
        if not self._may_send(session.device, gradient, pieces):
            pieces = []
        header = Gradient(
            run=offer.run,
            round=offer.round,
            device=session.device,
            start=offer.start,
            step=offer.step,
            answers=offer.params.digest,
            params=gradient.transfer,
            pushed=pieces[-1][1] if pieces else 0,
            room=self._room(session.device),
        )
        announcing = self.transport.publish(topic(self.site, session.device, "gradient"), wire.encode(header))
        ended, _ = await asyncio.gather(
            announcing, self._push(session, pieces), return_exceptions=True
        )  # in this order
        if isinstance(ended, Unreachable):
            log.debug("not announced, %s will offer again: %s", session.device, ended)
        elif ended is not None:
            raise ended

    async def _push(self, session: DeviceSession, pieces: Sequence[tuple[int, int]]) -> None:
        """Queue frames right behind the header, without waiting until the broker has acknowledged that."""
        self._queue(session, pieces)

    def answer_want(self, session: DeviceSession, want: Want) -> None:
        """Send what a device asks for: at most a window of it waits at once, nothing of it twice, and so many bytes.

        Raises:
            WireError: It asks for what does not exist.
        """
        gradient = session.gradient
        if gradient and gradient.transfer.digest == want.digest:
            pieces = gradient.pieces(want, self.transport.max_payload_bytes)
            if self._may_send(session.device, gradient, pieces):
                self._queue(session, pieces)

    def _may_send(self, device: str, gradient: Sender, pieces: Sequence[tuple[int, int]]) -> bool:
        """Count what a device asks for of its gradients; tell whether that is no more than anybody needs."""
        now, digest = self.clock(), gradient.transfer.digest
        known, budget = self._budgets.get(device, (b"", WishBudget(now)))
        if known != digest:
            budget.begin(gradient.transfer.size, now)
            self._budgets[device] = digest, budget
        return budget.take(sum(stop - start for start, stop in pieces) * BLOCK_BYTES, now)

    def _queue(self, session: DeviceSession, pieces: Sequence[tuple[int, int]]) -> None:
        if pieces and not session.waiting:
            self._turns.put_nowait(session)
        for start, stop in pieces:
            session.waiting.add(start, stop)

    async def send_gradients(self) -> None:
        """Send the frames that are due, a frame of each device in turn, until cancelled."""
        while True:
            session = await self._turns.get()
            start = next(iter(session.waiting), None)
            if start is None or session.gradient is None:
                continue  # that step is over
            frame = session.gradient.frame(start, session.waiting.pop(start))
            if session.waiting:
                self._turns.put_nowait(session)
            try:
                await self.transport.publish(topic(self.site, session.device, "gradient"), frame, assured=False)
            except Unreachable as error:
                log.debug("a frame for %s not sent, it will be asked for again: %s", session.device, error)
