"""Download of a release's missing parts as one bundle, into the board's store."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from device_agent.exchange.bundle_request import BundleRequest
from device_agent.exchange.download import Download
from device_agent.exchange.release_parts import ReleaseStore, find_lacking, unpack_bundle
from shared.errors import CorruptFile, WireError
from shared.protocol.inference.bundle import Lacking, build_lacks, bundle_pieces
from shared.protocol.inference.release import ReleaseManifest
from shared.protocol.inference.rollout import Ahead, Lacks, Offer
from shared.runtime.executor import background

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""Fetches of a bundle that arrives damaged."""


@dataclass
class BundleDownload:
    """Fetches bundles of missing parts and unpacks them; one at a time."""

    download: Download
    store: ReleaseStore
    request: BundleRequest
    _request_again: asyncio.Event = field(default_factory=asyncio.Event)

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
            message = build_lacks(self.download.device, offer.deployment, lacking)
            bundle = await self.request.ask(message, sum(piece.size for piece in bundle_pieces(manifest, lacking)))
            what = f"parts of {manifest.reference}"
            async with background(self._repeat(message)):
                path, _ = await self.download.receive(bundle.params, what, shared=bundle.shared)
            try:
                await worker(unpack_bundle, self.store, manifest, lacking, path)
            except CorruptFile as error:
                log.warning("%s, attempt %d of %d: %s", what, attempt + 1, ATTEMPTS, error)
                as_one_file = True
        if (await worker(find_lacking, self.store, manifest)) != Lacking():
            raise WireError(f"parts of {manifest.reference} were damaged {ATTEMPTS} times", reason="digest")

    async def _repeat(self, message: Lacks) -> None:
        """Send a request again whenever the offer arrives again."""
        self._request_again.clear()
        while True:
            await self._request_again.wait()
            self._request_again.clear()
            self.request.answered.clear()
            await self.request.send(message)
            await self.request.answered.wait()
            self.download.request_again()
