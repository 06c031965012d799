"""Download an offer's missing parts as one bundle; repeat the request until announced."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from device_agent.exchange.download import Download
from device_agent.exchange.resend import ask
from shared.errors import CorruptFile, Unreachable, WireError
from shared.protocol import wire
from shared.protocol.inference.bundle import Lacking, build_lacks
from shared.protocol.inference.rollout import Bundle, Lacks
from shared.protocol.topics import topic
from shared.runtime.executor import background

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""Fetches of a bundle that arrives damaged."""


class OfferedContent(Protocol):
    """Parts of an offered release or agent version; its methods may block."""

    @property
    def label(self) -> str:
        """Name for messages."""

    def find_lacking(self) -> Lacking:
        """Return the parts that the board lacks."""

    def bundle_size(self, lacking: Lacking) -> int:
        """Return the bytes of a bundle of parts."""

    def store(self, lacking: Lacking, bundle: Path) -> None:
        """Move a bundle of parts into the store.

        Raises:
            CorruptFile: A part is damaged; others may be stored.
            Unwritable: The disk is full or read-only.
        """


@dataclass
class BundleDownload:
    """Fetches bundles, requested on the channel `lacks`; one at a time."""

    download: Download
    _bundle: Bundle | None = None
    _answered: asyncio.Event = field(default_factory=asyncio.Event)
    _request_again: asyncio.Event = field(default_factory=asyncio.Event)

    def announce(self, bundle: Bundle) -> None:
        """Record the server's answer to a request."""
        self._bundle = bundle
        self._answered.set()
        self.download.request_again()  # if its frames are being received, the server may have lost the requests

    def repeat_request(self) -> None:
        """Send the current request again: the server repeated its offer and may have lost the request."""
        self._request_again.set()

    async def fetch(self, deployment: str, content: OfferedContent) -> None:
        """Fetch the missing parts of an offer.

        Raises:
            WireError: Every attempt brought damaged parts.
            Unwritable: The disk is full or read-only.
        """
        worker, label = self.download.worker, content.label
        for attempt in range(ATTEMPTS):
            lacking = await worker(content.find_lacking)
            if lacking == Lacking():
                return
            lacks, self._bundle = build_lacks(self.download.device, deployment, lacking), None
            find = partial(self._find, deployment, content.bundle_size(lacking))
            bundle = await ask(partial(self._send, lacks), self._answered, find)
            async with background(self._repeat(lacks)):
                path, _ = await self.download.receive(bundle.params, f"parts of {label}", shared=bundle.shared)
            try:
                await worker(content.store, lacking, path)
            except CorruptFile as error:
                log.warning("parts of %s, attempt %d of %d: %s", label, attempt + 1, ATTEMPTS, error)
        if await worker(content.find_lacking) != Lacking():
            raise WireError(f"parts of {label} were damaged {ATTEMPTS} times", reason="digest")

    async def _send(self, lacks: Lacks) -> None:
        """Send a request once; an unreachable broker is ignored."""
        with suppress(Unreachable):
            name = topic(self.download.site, self.download.device, "lacks")
            await self.download.transport.publish(name, wire.encode(lacks))

    def _find(self, deployment: str, size: int) -> Bundle | None:
        bundle = self._bundle
        return bundle if bundle and (bundle.deployment, bundle.params.size) == (deployment, size) else None

    async def _repeat(self, lacks: Lacks) -> None:
        """Send a request again whenever the offer arrives again."""
        self._request_again.clear()
        while True:
            await self._request_again.wait()
            self._request_again.clear()
            await self._send(lacks)
