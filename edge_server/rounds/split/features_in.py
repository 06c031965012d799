"""Receive each device's features of a split step, in memory, asked for until they are whole."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from edge_server.plan.server_config import LinkConfig
from edge_server.rounds.split.device_session import DeviceSession
from shared.errors import Unreachable, WireError
from shared.protocol import wire
from shared.protocol.messages import Features, Message
from shared.protocol.topics import topic
from shared.runtime.clock import Clock
from shared.transfer import frames
from shared.transfer.in_memory import MemorySink
from shared.transfer.pace import Pace
from shared.transfer.receiver import Expected, Policy, Receiver, room
from shared.transport.base import Transport

log = logging.getLogger(__name__)


@dataclass
class FeaturesIn:
    """The features of one step, which lie in the sessions of the devices.

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
            return is_expected  # of a step that is over
        is_new = receiver.take(frame, self.clock())
        await self._ask(session)
        return is_new or is_expected

    def expect_push(self, session: DeviceSession) -> None:
        """Note that a device has been told how much of its next features it may send unasked."""
        self._expect(session.device).ask((0, room(self.pace(session.device), self.window).blocks))

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
    def window(self) -> int:
        """Frames that one device may have under way; all together have no more than the budget."""
        return self._policy.share(sum(1 for session in self.sessions.values() if session.receiver))

    async def _ask(self, session: DeviceSession) -> None:
        if session.receiver and (want := session.receiver.want(self.window)):
            self._expect(session.device).ask(*want.ranges)
            await self.send(session.device, want, assured=False)

    async def send(self, device: str, message: Message, *, assured: bool = True) -> None:
        """Send a message to a device; what does not reach it, it will cause again by another offer.

        Args:
            device: Whose topic.
            message: What.
            assured: Whether the broker is to acknowledge it.
        """
        try:
            await self.transport.publish(topic(self.site, device, "gradient"), wire.encode(message), assured=assured)
        except Unreachable as error:
            log.debug("not sent, %s will offer again: %s", device, error)
