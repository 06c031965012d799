"""Models that this site receives from its neighbours during one gossip."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias

from edge_server.sites.identity import OFFER_S, SiteServices
from edge_server.sites.link import Links
from edge_server.sites.model_files import store_received
from shared.errors import WireError
from shared.protocol.clip import NAME, printable
from shared.protocol.messages import Transfer
from shared.transfer import frames
from shared.transfer.receiver import Receiver
from shared.transfer.to_file import FileSink

RequireOf: TypeAlias = Callable[[str, memoryview], None]
"""(neighbour, bytes) -> None; raises WireError for bytes that are no acceptable model."""


@dataclass
class ModelFetches:
    """Receivers by neighbour.

    Attributes:
        folder: Folder of the gossip.
        require: Raises WireError for bytes that are no acceptable model.
        most_bytes: Size of the largest accepted model.
        on_model: Called with the neighbour and the digest of each model that is stored.
        on_refused: Called with the neighbour and the reason of each model that is refused.
    """

    links: Links
    services: SiteServices
    folder: Path
    require: RequireOf
    most_bytes: int
    on_model: Callable[[str, bytes], Awaitable[None]]
    on_refused: Callable[[str, str], None]
    transfer_s: dict[str, float] = field(default_factory=dict)
    receivers: dict[str, Receiver[FileSink]] = field(default_factory=dict)
    _began: dict[str, float] = field(default_factory=dict)

    async def watch(self) -> None:
        """Repeat requests for overdue frames, until cancelled."""
        while True:
            clock = self.services.clock
            for peer, fetch in list(self.receivers.items()):
                if not fetch.complete and not fetch.remaining_s(clock()):
                    fetch.time_out(clock())
                    await self._ask(peer, fetch)
            waits = [fetch.remaining_s(clock()) for fetch in self.receivers.values() if not fetch.complete]
            await asyncio.sleep(max(0.05, min([OFFER_S, *waits])))

    async def fetch(self, peer: str, transfer: Transfer) -> None:
        """Request an offered model, or continue to.

        Raises:
            WireError: It is too large, damaged or refused.
        """
        now, fetch = self.services.clock(), self.receivers.get(peer)
        if fetch and fetch.transfer.digest == transfer.digest:
            fetch.note_waiting_sender(now)
        else:
            if transfer.size > self.most_bytes:
                raise WireError(f"model of {transfer.size} bytes, at most {self.most_bytes}", reason="shape")
            policy = self.services.policy
            place, pace = partial(FileSink, self.folder / f"_{peer}"), policy.pace(now, transfer.frame_bytes)
            self.receivers[peer] = fetch = Receiver(transfer, place, policy, pace, now)
            self._began.setdefault(peer, now)
        await self._continue(peer, fetch)

    async def take_frame(self, peer: str, data: bytes) -> None:
        """Take a frame of a model that is being received.

        Raises:
            WireError: It is invalid, or the model is refused.
        """
        fetch = self.receivers.get(peer)
        if fetch and not fetch.complete:
            fetch.take(frames.decode(data), self.services.clock())
            await self._continue(peer, fetch)

    async def _continue(self, peer: str, fetch: Receiver[FileSink]) -> None:
        """Request more frames; check a complete model and store it on disk."""
        if not fetch.complete:
            await self._ask(peer, fetch)
            return
        try:
            await self.services.worker(store_received, fetch, self.folder / peer, partial(self.require, peer))
        except WireError as error:
            if error.reason == "digest" and not fetch.is_hopeless:
                await self._ask(peer, fetch)
            else:
                self.on_refused(peer, printable(error.reason, NAME))
            raise
        self.transfer_s.setdefault(peer, self.services.clock() - self._began[peer])
        await self.on_model(peer, fetch.transfer.digest)

    async def _ask(self, peer: str, fetch: Receiver[FileSink]) -> None:
        if want := fetch.want():
            await self.links.reply(peer, "gossiped", want)
