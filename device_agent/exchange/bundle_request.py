"""Request for a bundle of missing parts, repeated until the server announces it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from device_agent.exchange.download import Download
from device_agent.exchange.resend import ask
from shared.errors import Unreachable
from shared.protocol import wire
from shared.protocol.inference.rollout import Bundle, Lacks
from shared.protocol.topics import topic


@dataclass
class BundleRequest:
    """Requests bundles on the channel `lacks`, one at a time.

    Attributes:
        answered: Set for every bundle that the server announces.
    """

    download: Download
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    _bundle: Bundle | None = None

    def announce(self, bundle: Bundle) -> None:
        """Record the server's answer."""
        self._bundle = bundle
        self.answered.set()

    async def ask(self, message: Lacks, size: int) -> Bundle:
        """Repeat a request until the server announces a bundle of `size` bytes; return it."""
        self._bundle = None
        return await ask(partial(self.send, message), self.answered, partial(self._find, message.deployment, size))

    async def send(self, message: Lacks) -> None:
        """Send a request once; an unreachable broker is ignored."""
        name = topic(self.download.site, self.download.device, "lacks")
        with suppress(Unreachable):
            await self.download.transport.publish(name, wire.encode(message))

    def _find(self, deployment: str, size: int) -> Bundle | None:
        bundle = self._bundle
        return bundle if bundle and (bundle.deployment, bundle.params.size) == (deployment, size) else None
