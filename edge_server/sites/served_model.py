"""This site's model of the last gossip, served to neighbours on request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from edge_server.sites.link import Links
from shared.errors import WireError
from shared.protocol.messages import Want
from shared.transfer.sender import Sender
from shared.transfer.to_file import view

MOST_WANTS = 8
"""Most queued requests of one neighbour; it repeats the others."""


@dataclass
class ServedModel:
    """Our model, and the requests for it.

    Attributes:
        model: Its frames; None before the first gossip.
        sent_bytes: Bytes of frames sent in this gossip, by neighbour.
    """

    links: Links
    frame_bytes: int
    model: Sender | None = None
    sent_bytes: dict[str, int] = field(default_factory=dict)
    _wants: dict[str, asyncio.Queue[Want]] = field(default_factory=dict)

    def open_queues(self, neighbours: Iterable[str]) -> None:
        """Accept requests of these neighbours."""
        self._wants = {peer: asyncio.Queue(MOST_WANTS) for peer in neighbours}

    def load(self, path: Path) -> None:
        """Serve the model in a file from now on.

        Raises:
            FileNotFoundError: There is none.
        """
        self.model, self.sent_bytes = Sender.of_parts([view(path)], self.frame_bytes), {}

    async def serve(self, peer: str) -> None:
        """Send requested frames to a neighbour, until cancelled."""
        while True:
            await self._send(peer, await self._wants[peer].get())

    def queue(self, peer: str, want: Want) -> None:
        """Queue a request for frames of the current model."""
        if self.is_current(want.digest):
            with suppress(asyncio.QueueFull):
                self._wants[peer].put_nowait(want)

    def is_current(self, digest: bytes) -> bool:
        """Return true for the digest of the current model."""
        return self.model is not None and digest == self.model.transfer.digest

    async def _send(self, peer: str, want: Want) -> None:
        """Send requested frames; if the broker is unreachable, the peer requests them again."""
        if not self.model or not self.is_current(want.digest):
            return
        try:
            for frame in self.model.answer(want, self.links.payload_limit(peer)):
                if not await self.links.send(peer, "gossip", frame, assured=False):
                    return
                self.sent_bytes[peer] = self.sent_bytes.get(peer, 0) + len(frame)
        except WireError as error:
            self.links.refuse(peer, error)
