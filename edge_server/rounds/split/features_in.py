"""What of a split step comes up: each device's features, in memory, asked for until they are whole."""

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
from shared.transfer.in_memory import Receiving
from shared.transfer.pace import Pace
from shared.transport.base import Transport

log = logging.getLogger(__name__)

ATTEMPTS = 3


@dataclass
class Coming:
    """One device's features on their way.

    Attributes:
        offer: What was offered.
        receiving: What of it is here.
        damaged: How often the whole was not what was offered.
    """

    offer: Features
    receiving: Receiving
    damaged: int = 0


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

    async def begin(self, device: str, offer: Features) -> None:
        """Ask for the features of an offer, or for what lacks of them.

        Raises:
            WireError: There are more than this server takes; no memory was taken for them.
        """
        one = self.coming.get(device)
        if one and one.offer.params == offer.params:
            one.receiving.offered_again(offer.pushed, self.clock())
        else:
            self.coming.pop(device, None)
            limit = self.link.max_features_mb << 20
            receiving = Receiving(offer.params, offer.pushed, self.pace(device), self.clock(), limit=limit)
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
        one.receiving.take(frame, len(data), self.clock())
        if not one.receiving.complete:
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
        one.damaged += 1
        if error.reason != "digest" or one.damaged == ATTEMPTS:
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
            self.paces[device] = Pace(self.link.patience_s, self.clock(), self.link.frame_bytes)
            self.paces[device].begin_small()
        return self.paces[device]

    @property
    def window(self) -> int:
        """Frames that one device may have under way; all together have no more than the budget."""
        return max(2, min(self.link.window, self.link.budget // max(1, len(self.coming))))

    async def _ask(self, device: str, one: Coming) -> None:
        if want := one.receiving.want(self.window):
            await self.tell(device, want, assured=False)

    async def tell(self, device: str, message: Message, *, assured: bool = True) -> None:
        """Say something to a device; what does not reach it, it will cause again by another offer."""
        try:
            await self.transport.publish(topic(self.site, device, "gradient"), wire.encode(message), assured=assured)
        except Unreachable as error:
            log.debug("not told, %s will offer again: %s", device, error)
