"""Send messages to a rollout's boards, repeated until their status shows the effect."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from edge_server.journal.rollouts.state import RolloutState
from edge_server.release.rollout.board_reports import BoardReports
from edge_server.release.rollout.due_messages import due_messages
from edge_server.release.rollout.link import RolloutLink
from shared.errors import Unreachable
from shared.protocol import wire
from shared.protocol.inference.rollout import Offer
from shared.protocol.messages import Message
from shared.protocol.topics import topic

log = logging.getLogger(__name__)

RESEND_S = 20.0
"""Least interval between two equal messages to a board."""


@dataclass
class BoardSender:
    """Sends messages to boards."""

    link: RolloutLink
    _sent_at: dict[tuple[str, str], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._manifest = self.link.stored.content()

    def note_connection(self, device: str) -> None:
        """Repeat messages to a board that has connected: it may have missed them while offline."""
        for key in [key for key in self._sent_at if key[0] == device]:
            del self._sent_at[key]

    async def send_due(self, state: RolloutState, reports: BoardReports) -> None:
        """Send the messages that are due and may not have arrived, each at most every `RESEND_S`."""
        now = self.link.clock()
        for device, message in due_messages(
            state, reports.boards(), self._manifest, self._forgot_offer, reports.prepared
        ):
            key = device, type(message).__name__
            if now - self._sent_at.get(key, -RESEND_S) >= RESEND_S and await self.send(device, message):
                self._sent_at[key] = now

    def _forgot_offer(self, device: str) -> bool:
        """Check whether the board or this process has restarted since the offer was sent."""
        return (device, Offer.__name__) not in self._sent_at

    async def send(self, device: str, message: Message) -> bool:
        """Send a message once; return False if the broker is unreachable."""
        name = topic(self.link.site, device, self.link.offer_channel)
        try:
            await self.link.transport.publish(name, wire.encode(message))
        except Unreachable as error:
            log.debug("%s to %s not sent, will be retried: %s", type(message).__name__, device, error)
            return False
        return True
