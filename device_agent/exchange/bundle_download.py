"""Download of a release's missing parts as one bundle, into the board's store."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from device_agent.exchange.download import Download
from device_agent.exchange.release_parts import PartStore, find_lacking, unpack_bundle
from device_agent.exchange.resend import ask
from shared.errors import CorruptFile, Unreachable, WireError
from shared.protocol import wire
from shared.protocol.inference.bundle import Lacking, build_lacks, bundle_pieces
from shared.protocol.inference.release import ReleaseManifest
from shared.protocol.inference.rollout import Ahead, Bundle, Offer
from shared.protocol.topics import topic
from shared.runtime.executor import background

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""Fetches of a bundle that arrives damaged."""


@dataclass
class BundleDownload:
    """Requests bundles of missing parts and unpacks them; one at a time.

    Attributes:
        download: Fetches payloads, on the channels `parts` and `lacks`.
    """

    download: Download
    store: PartStore
    _bundle: Bundle | None = None
    _answered: asyncio.Event = field(default_factory=asyncio.Event)
    _request_again: asyncio.Event = field(default_factory=asyncio.Event)

    def announce(self, bundle: Bundle) -> None:
        """Record the server's answer to a request."""
        self._bundle = bundle
        self._answered.set()

    def repeat_request(self) -> None:
        """Send the current request again: the server repeated its offer and may have lost the request."""
        self._request_again.set()

    async def fetch(self, offer: Offer | Ahead, manifest: ReleaseManifest) -> None:
        """Fetch the missing parts of a release into the store.

        Raises:
            WireError: Every attempt brought damaged parts.
            Unwritable: The disk is full or read-only.
        """
        as_one_file, worker = False, self.download.worker
        for attempt in range(ATTEMPTS):
            lacking = await worker(find_lacking, self.store, manifest, as_one_file=as_one_file)
            if not (lacking.parts or lacking.header):
                return
            bundle = await self._request_bundle(offer, manifest, lacking)
            what = f"parts of {manifest.reference}"
            path, _ = await self._receive(offer, lacking, bundle, what)
            try:
                await worker(unpack_bundle, self.store, manifest, lacking, path)
            except CorruptFile as error:
                log.warning("%s, attempt %d of %d: %s", what, attempt + 1, ATTEMPTS, error)
                as_one_file = True
        if (await worker(find_lacking, self.store, manifest)) != Lacking():
            raise WireError(f"parts of {manifest.reference} were damaged {ATTEMPTS} times", reason="digest")

    async def _request_bundle(self, offer: Offer | Ahead, manifest: ReleaseManifest, lacking: Lacking) -> Bundle:
        """Request the missing parts until the server announces their transfer."""
        size = sum(piece.size for piece in bundle_pieces(manifest, lacking))
        self._bundle = None
        return await ask(
            partial(self._request_parts, offer, lacking), self._answered, partial(self._bundle_of, offer, size)
        )

    def _bundle_of(self, offer: Offer | Ahead, size: int) -> Bundle | None:
        bundle = self._bundle
        return bundle if bundle and (bundle.deployment, bundle.params.size) == (offer.deployment, size) else None

    async def _request_parts(self, offer: Offer | Ahead, lacking: Lacking) -> None:
        download = self.download
        message = build_lacks(download.device, offer.deployment, lacking)
        with suppress(Unreachable):  # `ask` repeats it
            await download.transport.publish(topic(download.site, download.device, "lacks"), wire.encode(message))

    async def _receive(self, offer: Offer | Ahead, lacking: Lacking, bundle: Bundle, what: str) -> tuple[Path, int]:
        """Fetch a bundle; repeat the request whenever the offer arrives again, since the server may have lost it."""
        async with background(self._repeat_request(offer, lacking)):
            return await self.download.receive(bundle.params, what, shared=bundle.shared)

    async def _repeat_request(self, offer: Offer | Ahead, lacking: Lacking) -> None:
        self._request_again.clear()
        while True:
            await self._request_again.wait()
            self._request_again.clear()
            self._answered.clear()
            await self._request_parts(offer, lacking)
            await self._answered.wait()
            self.download.request_again()
