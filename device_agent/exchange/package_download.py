"""Download of an agent package into the upgrade folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from device_agent.exchange.bundle_request import BundleRequest
from device_agent.exchange.download import Download
from device_agent.upgrade.proof import open_folder
from shared.errors import WireError
from shared.protocol.inference.release import sha256_of
from shared.protocol.inference.rollout import Lacks, Offer
from shared.protocol.packages import Build
from shared.runtime.durable import sync

ATTEMPTS = 3
PRIVATE = 0o600


@dataclass
class PackageDownload:
    """Fetches packages into the upgrade folder below `state_dir`, one at a time."""

    download: Download
    state_dir: Path
    request: BundleRequest

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
            parts = (bytes.fromhex(build.sha256),)
            message = Lacks(device=self.download.device, deployment=offer.deployment, parts=parts)
            bundle = await self.request.ask(message, build.size)
            path, _ = await self.download.receive(bundle.params, f"agent {version}", shared=bundle.shared)
            await worker(_move_durably, path, package)
        if not await worker(_is_complete, package, build):
            await worker(package.unlink)
            raise WireError(f"{build.file} was damaged {ATTEMPTS} times", reason="digest")


def _is_complete(path: Path, build: Build) -> bool:
    return path.is_file() and path.stat().st_size == build.size and sha256_of(path.read_bytes()) == build.sha256


def _move_durably(path: Path, target: Path) -> None:
    path.chmod(PRIVATE)
    sync(path)
    path.replace(target)
    sync(target.parent)
