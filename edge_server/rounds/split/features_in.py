"""Receive each device's features of a split step, in memory, asked for until they are whole."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from edge_server.config import LinkConfig
from shared.errors import Unreachable, WireError
from shared.protocol import wire
from shared.protocol.messages import Features, Message
from shared.protocol.topics import topic
from shared.runtime.clock import Clock
from shared.transfer import frames
from shared.transfer.in_memory import MemorySink
from shared.transfer.pace import Pace
from shared.transfer.receiver import Policy, Receiver
from shared.transport.base import Transport

log = logging.getLogger(__name__)


@dataclass
class Coming:
    """One device's features on their way.

    Attributes:
        offer: What was offered.
        receiving: What of it is here.
    """

    offer: Features
    receiving: Receiver[MemorySink]


@dataclass
class Incoming:
    """The features of one step, by device.

    Attributes:
        paces: How fast they come from each device; outlives the step, and the round.
        coming: Those that are not read yet.
    """

    site: str
    transport: Transport
    clock: Clock
    link: LinkConfig
    paces: dict[str, Pace]
    coming: dict[str, Coming] = field(default_factory=dict)
    _policy: Policy = field(init=False)

    def __post_init__(self) -> None:
        """Take the limits of features from the link's."""
        self._policy = self.link.policy(self.link.max_features_mb << 20)

    async def begin(self, device: str, offer: Features) -> None:
        """Ask for the features of an offer, or for what lacks of them.

        Raises:
            WireError: There are more than this server takes; no memory was taken for them.
        """
        one, now = self.coming.get(device), self.clock()
        if one and one.offer.params == offer.params:
            one.receiving.offered_again(offer.pushed, now)
        else:
            self.coming.pop(device, None)
            pace = self.pace(device)
            receiving = Receiver(offer.params, MemorySink, self._policy, pace, now, pushed=offer.pushed)
            one = self.coming[device] = Coming(offer, receiving)
        await self._ask(device, one)

    async def frame(self, device: str, data: bytes) -> bool:
        """Take a frame of features; tell whether they are whole.

        Raises:
            WireError: It is damaged or does not fit the offer.
        """
        frame, one = frames.decode(data), self.coming.get(device)
        if one is None or frame.digest != one.offer.params.digest:
            return False  # of a step that is over
        one.receiving.take(frame, self.clock())
        await self._ask(device, one)
        return one.receiving.complete

    async def returned(self, device: str) -> None:
        """Ask a device that has connected anew for all that lacks: what was under way is lost."""
        if one := self.coming.get(device):
            one.receiving.lost(self.clock())
            await self._ask(device, one)

    async def damaged(self, device: str, error: WireError) -> bool:
        """Ask for a device's features anew if they were damaged on their way; tell whether there is hope."""
        one = self.coming[device]
        if error.reason != "digest" or one.receiving.is_hopeless:
            return False
        await self._ask(device, one)
        return True

    async def ask_again(self) -> None:
        """Ask anew for what does not come."""
        for device, one in list(self.coming.items()):
            if not one.receiving.left_s(self.clock()):
                one.receiving.gave_up(self.clock())
                await self._ask(device, one)

    def pace(self, device: str) -> Pace:
        """Return how fast frames come from a device; small ones first, since its link is not known yet."""
        if device not in self.paces:
            self.paces[device] = self._policy.pace(self.clock())
        return self.paces[device]

    @property
    def window(self) -> int:
        """Frames that one device may have under way; all together have no more than the budget."""
        return self._policy.share(len(self.coming))

    async def _ask(self, device: str, one: Coming) -> None:
        if want := one.receiving.want(self.window):
            await self.tell(device, want, assured=False)

    async def tell(self, device: str, message: Message, *, assured: bool = True) -> None:
        """Say something to a device; what does not reach it, it will cause again by another offer."""
        try:
            await self.transport.publish(topic(self.site, device, "gradient"), wire.encode(message), assured=assured)
        except Unreachable as error:
            log.debug("not told, %s will offer again: %s", device, error)
