"""Transfer of split-step payloads: features up, gradients down.

Features are received in memory and belong to the device's session. A gradient's header grants how much of the next
features may be pushed without a request, so one class handles both directions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from edge_server.plan.server_config import LinkConfig
from edge_server.rounds.broadcast import add_payload, make_request_budget
from edge_server.rounds.split.device_session import DeviceSession
from shared.errors import Unreachable, WireError
from shared.protocol import wire
from shared.protocol.messages import BLOCK_BYTES, Features, Gradient, Message, Room, Want
from shared.protocol.topics import topic
from shared.runtime.clock import Clock
from shared.runtime.token_bucket import TokenBucket
from shared.transfer import frames
from shared.transfer.in_memory import MemorySink
from shared.transfer.pace import Pace
from shared.transfer.receiver import Allowance, Policy, Receiver, push_credit
from shared.transfer.sender import Sender
from shared.transport.base import Transport

log = logging.getLogger(__name__)


@dataclass
class GradientQueue:
    """Gradient frames to send during one round, one of each device in turn; the pieces belong to the sessions."""

    site: str
    transport: Transport
    clock: Clock
    _budgets: dict[str, tuple[bytes, TokenBucket]] = field(default_factory=dict)
    _turns: asyncio.Queue[DeviceSession] = field(default_factory=asyncio.Queue)

    def put(self, session: DeviceSession, pieces: Sequence[tuple[int, int]]) -> None:
        """Queue pieces of a session's gradient."""
        if pieces and not session.pending:
            self._turns.put_nowait(session)
        for start, stop in pieces:
            session.pending.add(start, stop)

    async def push(self, session: DeviceSession, pieces: Sequence[tuple[int, int]]) -> None:
        """Queue frames behind the header, without waiting for the broker to acknowledge it."""
        self.put(session, pieces)

    def may_send(self, device: str, gradient: Sender, pieces: Sequence[tuple[int, int]]) -> bool:
        """Charge requested pieces to the device's budget; return false if they exceed it."""
        now, digest = self.clock(), gradient.transfer.digest
        budget_digest, budget = self._budgets.get(device, (b"", make_request_budget(now)))
        if budget_digest != digest:
            add_payload(budget, gradient.transfer.size, now)
            self._budgets[device] = digest, budget
        return budget.take(sum(stop - start for start, stop in pieces) * BLOCK_BYTES, now)

    async def run(self) -> None:
        """Send queued frames, one of each device in turn, until cancelled."""
        while True:
            session = await self._turns.get()
            start = next(iter(session.pending), None)
            if start is None or session.gradient is None:
                continue  # the step has closed
            frame = session.gradient.frame(start, session.pending.pop(start))
            if session.pending:
                self._turns.put_nowait(session)
            try:
                await self.transport.publish(topic(self.site, session.device, "gradient"), frame, assured=False)
            except Unreachable as error:
                log.debug("frame for %s not sent, the device requests it again: %s", session.device, error)


@dataclass
class StepPayloads:
    """Features and gradients in flight during one round.

    Attributes:
        sessions: Sessions of the round's devices.
        paces: Pace of each device's features; shared by all rounds.
        queue: Frames of gradients to send.
    """

    site: str
    transport: Transport
    clock: Clock
    link: LinkConfig
    paces: dict[str, Pace]
    sessions: Mapping[str, DeviceSession]
    _policy: Policy = field(init=False)
    _expected: dict[str, Allowance] = field(default_factory=dict)
    queue: GradientQueue = field(init=False)

    def __post_init__(self) -> None:
        self.queue = GradientQueue(self.site, self.transport, self.clock)
        self._policy = self.link.policy(self.link.max_features_mb << 20)

    async def begin(self, session: DeviceSession, offer: Features) -> None:
        """Request the missing frames of an offer.

        Raises:
            WireError: The features exceed the server's limit; no memory was allocated.
        """
        now, receiver = self.clock(), session.receiver
        session.offer, session.features = offer, None
        if receiver and receiver.transfer == offer.params:
            receiver.note_new_offer(offer.pushed, now)
        else:
            session.receiver = None
            pace = self.pace(session.device)
            session.receiver = Receiver(offer.params, MemorySink, self._policy, pace, now, pushed=offer.pushed)
        await self._ask(session)

    async def take(self, session: DeviceSession, data: bytes) -> bool:
        """Take a frame of features; return true if it held new or requested blocks.

        Raises:
            WireError: It is damaged or does not match the offer.
        """
        frame, receiver = frames.decode(data), session.receiver
        is_expected = session.device in self._expected and self._expected[session.device].take(frame.data.nbytes)
        if receiver is None or frame.digest != receiver.transfer.digest:
            self.pace(session.device).note_size(frame.data.nbytes)
            return is_expected  # from a past step
        is_new = receiver.take(frame, self.clock())
        await self._ask(session)
        return is_new or is_expected

    def expect_push(self, session: DeviceSession) -> None:
        """Account for the blocks that a device may push without a request."""
        self._expect(session.device).ask((0, self._room(session.device).blocks))

    def _room(self, device: str) -> Room:
        return push_credit(self.pace(device), self.window)

    def _expect(self, device: str) -> Allowance:
        """Return the account of what was requested from a device."""
        return self._expected.setdefault(device, self._policy.new_allowance())

    async def ask_after_reconnect(self, session: DeviceSession) -> None:
        """Request everything missing from a device that has reconnected; frames in flight are lost."""
        if session.receiver:
            session.receiver.lost(self.clock())
            await self._ask(session)

    async def retry(self, session: DeviceSession, error: WireError) -> bool:
        """Request damaged features again; return false if that is hopeless."""
        if session.receiver is None or error.reason != "digest" or session.receiver.is_hopeless:
            return False
        await self._ask(session)
        return True

    async def ask_again(self) -> None:
        """Repeat requests for overdue frames."""
        for session in self.receiving_sessions():
            if session.receiver and not session.receiver.remaining_s(self.clock()):
                session.receiver.time_out(self.clock())
                await self._ask(session)

    def receiving_sessions(self) -> list[DeviceSession]:
        """Return the sessions whose features are in flight or not yet decoded."""
        return [session for session in self.sessions.values() if session.receiver]

    def pace(self, device: str) -> Pace:
        """Return the pace of a device's frames; an unknown link starts with small ones."""
        if device not in self.paces:
            self.paces[device] = self._policy.pace(self.clock())
        return self.paces[device]

    @property
    def frame_bytes(self) -> int:
        """Largest frame of a gradient, in bytes."""
        return frames.largest_frame(self.link.frame_bytes, self.transport.max_payload_bytes)

    @property
    def window(self) -> int:
        """Frames that one device may have in flight, within the window that all devices share."""
        return self._policy.share(sum(1 for session in self.sessions.values() if session.receiver))

    async def _ask(self, session: DeviceSession) -> None:
        if session.receiver and (want := session.receiver.want(self.window)):
            self._expect(session.device).ask(*want.ranges)
            await self.tell(session.device, want, assured=False)

    async def tell(self, device: str, message: Message, *, assured: bool = True) -> None:
        """Send a message; a device that misses it offers again.

        Args:
            assured: Whether the broker acknowledges it.
        """
        try:
            await self.transport.publish(topic(self.site, device, "gradient"), wire.encode(message), assured=assured)
        except Unreachable as error:
            log.debug("not sent, %s offers again: %s", device, error)

    async def announce(self, session: DeviceSession, offer: Features) -> None:
        """Announce a device's gradient and push what it has room for.

        Args:
            session: If it has no gradient of the offered step yet, nothing is sent.
            offer: The features that the gradient answers.
        """
        gradient = session.answers.of_step(offer.step)
        if gradient is None:
            return
        session.send(gradient)
        pieces = [] if session.pending else gradient.plan_push(offer.room, self.transport.max_payload_bytes)
        if not self.queue.may_send(session.device, gradient, pieces):
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
            announcing, self.queue.push(session, pieces), return_exceptions=True
        )  # header first
        if isinstance(ended, Unreachable):
            log.debug("not announced, %s offers again: %s", session.device, ended)
        elif ended is not None:
            raise ended

    def answer_want(self, session: DeviceSession, want: Want) -> None:
        """Queue requested pieces: at most a window at once, none twice, within the byte budget.

        Raises:
            WireError: It requests blocks that do not exist.
        """
        gradient = session.gradient
        if gradient and gradient.transfer.digest == want.digest:
            pieces = gradient.pieces(want, self.transport.max_payload_bytes)
            if self.queue.may_send(session.device, gradient, pieces):
                self.queue.put(session, pieces)
