"""Handle a server's offers one at a time; announce each status change.

Models and agent versions share this loop. An offer may arrive twice or be lost, and this process may be killed at any
point: the server repeats what the status does not show.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from device_agent.exchange.bundle_download import BundleDownload
from device_agent.exchange.download import Download
from device_agent.exchange.resend import announce
from shared.errors import FieldFleetError, WireError
from shared.protocol import wire
from shared.protocol.inference.rollout import Ahead, Bundle, Offer, Releases, Withdraw
from shared.protocol.topics import topic
from shared.runtime.executor import background

log = logging.getLogger(__name__)

REASON_CHARS = 500


class OfferHandler(Protocol):
    """Carries out offers of one kind."""

    async def serve(self, offer: Offer) -> None:
        """Carry out an offer.

        Raises:
            FieldFleetError, OSError, ValueError: It cannot be carried out.
        """

    async def refuse(self, offer: Offer, reason: str) -> None:
        """Report an offer as refused."""

    async def prefetch(self, ahead: Ahead) -> None:
        """Fetch the parts of a future offer."""

    def has_prefetched(self, deployment: str) -> bool:
        """Return True if nothing need be fetched before the offer of a deployment."""

    async def withdraw(self, message: Withdraw) -> None:
        """Stop fetching a version; roll back if asked to or if it is not in use yet."""

    async def build_statuses(self) -> Releases:
        """Return the board's status."""


@dataclass
class OfferLoop:
    """Receives offers; a newer one cancels the current.

    Attributes:
        offers_on, statuses_on: Channels of the offers and of the board's retained status.
        bundles: Fetches parts; set by the loop.
        changed: Set it on every change of the status.
    """

    download: Download
    offers_on: str
    statuses_on: str
    handler: OfferHandler
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _offer: Offer | Ahead | None = None
    _task: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.bundles = BundleDownload(self.download)

    async def run(self) -> None:
        """Take part in rollouts until cancelled."""
        site, device, transport = self.download.site, self.download.device, self.download.transport
        statuses = announce(transport, topic(site, device, self.statuses_on), self.changed, self.handler.build_statuses)
        try:
            async with transport.subscribe(topic(site, device, self.offers_on)) as inbox, background(statuses):
                async for _, data in inbox:
                    try:
                        self._handle(wire.decode(data))
                    except WireError as error:
                        log.warning("dropped: %s", error)
        finally:
            if self._task:
                self._task.cancel()
                await asyncio.wait({self._task})

    def _handle(self, message: object) -> None:
        match message:
            case Offer() | Ahead():
                self._handle_offer(message)
            case Bundle():
                self.bundles.announce(message)
            case Withdraw():
                self._begin(None, partial(self.handler.withdraw, message))
            case _:
                kind = type(message).__name__
                raise WireError(f"unexpected message {kind} on channel {self.offers_on!r}", reason="unexpected")

    def _handle_offer(self, message: Offer | Ahead) -> None:
        """Start with an offer or a prefetch; a running prefetch of the same release continues into the offer."""
        current, is_busy = self._offer, self._task is not None and not self._task.done()
        if is_busy and message == current:
            self.bundles.repeat_request()
        elif isinstance(message, Offer):
            is_next = isinstance(current, Ahead) and current.manifest == message.manifest
            self._begin(message, partial(self._serve, message), goes_on=is_next)
        elif (is_busy and isinstance(current, Offer)) or self.handler.has_prefetched(message.deployment):
            self.changed.set()
        else:
            self._begin(message, partial(self.handler.prefetch, message))

    def _begin(
        self, offer: Offer | Ahead | None, then: Callable[[], Awaitable[None]], *, goes_on: bool = False
    ) -> None:
        before, self._offer = self._task, offer
        self._task = asyncio.create_task(_run_after(before, then, goes_on=goes_on), name=self.offers_on)
        self._task.add_done_callback(_log_crash)

    async def _serve(self, offer: Offer) -> None:
        """Carry out an offer; refuse one that cannot be carried out."""
        try:
            await self.handler.serve(offer)
        except (FieldFleetError, OSError, ValueError) as error:
            log.warning("%s/%d is refused: %s", offer.name, offer.version, error)
            await self.handler.refuse(offer, str(error)[:REASON_CHARS])


async def _run_after(before: asyncio.Task[None] | None, then: Callable[[], Awaitable[None]], *, goes_on: bool) -> None:
    """Run `then` after the task before has ended; cancel that task unless it goes on."""
    if before:
        if not goes_on:
            before.cancel()
        try:
            await asyncio.wait({before})
        finally:
            before.cancel()  # cancelling this cancels that, too
            await asyncio.wait({before})
    try:
        await then()
    except (FieldFleetError, OSError) as error:
        log.warning("offer: %s", error)


def _log_crash(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error("internal error, the offer is dropped", exc_info=error)
