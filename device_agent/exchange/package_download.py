"""Download of an agent package into the upgrade folder."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from device_agent.exchange.download import Download
from device_agent.exchange.resend import ask
from device_agent.upgrade.proof import open_folder
from shared.errors import WireError
from shared.protocol import wire
from shared.protocol.inference.release import sha256_of
from shared.protocol.inference.rollout import Bundle, Lacks, Offer
from shared.protocol.packages import Build
from shared.protocol.topics import topic
from shared.runtime.durable import sync

ATTEMPTS = 3
PRIVATE = 0o600


@dataclass
class PackageDownload:
    """Requests and receives packages, one at a time.

    Attributes:
        download: Fetches payloads, on the channels `parts` and `lacks`.
        state_dir: Parent of the upgrade folder.
    """

    download: Download
    state_dir: Path
    _bundle: Bundle | None = None
    _answered: asyncio.Event = field(default_factory=asyncio.Event)

    def announce(self, bundle: Bundle) -> None:
        """Record the server's answer to a request."""
        self._bundle = bundle
        self._answered.set()

    async def fetch(self, offer: Offer, build: Build, version: str) -> None:
        """Fetch this board's package into the upgrade folder, unless it is there.

        Raises:
            WireError: Every attempt brought a damaged package.
            Unwritable: The disk is full or read-only.
        """
        worker = self.download.worker
        package = (await worker(open_folder, self.state_dir)) / f"{version}.deb"
        for _ in range(ATTEMPTS):
            if await worker(_is_complete, package, build):
                return
            bundle = await self._request_bundle(offer, build)
            path, _ = await self.download.receive(bundle.params, f"agent {version}", shared=bundle.shared)
            await worker(_move_durably, path, package)
        if not await worker(_is_complete, package, build):
            await worker(package.unlink)
            raise WireError(f"{build.file} was damaged {ATTEMPTS} times", reason="digest")

    async def _request_bundle(self, offer: Offer, build: Build) -> Bundle:
        """Request the package until the server announces its transfer."""
        download = self.download
        message = Lacks(device=download.device, deployment=offer.deployment, parts=(bytes.fromhex(build.sha256),))
        name = topic(download.site, download.device, "lacks")
        self._bundle = None

        def bundle() -> Bundle | None:
            reply = self._bundle
            is_match = reply and (reply.deployment, reply.params.size) == (offer.deployment, build.size)
            return reply if is_match else None

        return await ask(lambda: download.transport.publish(name, wire.encode(message)), self._answered, bundle)


def _is_complete(path: Path, build: Build) -> bool:
    return path.is_file() and path.stat().st_size == build.size and sha256_of(path.read_bytes()) == build.sha256


def _move_durably(path: Path, target: Path) -> None:
    path.chmod(PRIVATE)
    sync(path)
    path.replace(target)
    sync(target.parent)
