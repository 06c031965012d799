"""Upgrade folder, agent's side: fetched package, and request to the updater."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from device_agent.upgrade.proof import PRIVATE, open_folder
from device_agent.upgrade.record import WANTED, UpgradeTarget
from shared.errors import CorruptFile
from shared.protocol.inference.bundle import Lacking
from shared.protocol.inference.release import sha256_of
from shared.protocol.packages import Build
from shared.runtime.durable import replace_file, sync


@dataclass(frozen=True)
class MissingPackage:
    """Package of an offered version, for this board."""

    state_dir: Path
    build: Build
    version: str

    @property
    def label(self) -> str:
        return f"agent {self.version}"

    def find_lacking(self) -> Lacking:
        is_stored = _is_complete(open_folder(self.state_dir) / f"{self.version}.deb", self.build)
        return Lacking() if is_stored else Lacking(frozenset({self.build.sha256}))

    def bundle_size(self, _lacking: Lacking) -> int:
        return self.build.size

    def store(self, _lacking: Lacking, bundle: Path) -> None:
        if not _is_complete(bundle, self.build):
            raise CorruptFile(f"{self.build.file}: its digest is not {self.build.sha256[:12]}…")
        package = open_folder(self.state_dir) / f"{self.version}.deb"
        bundle.chmod(PRIVATE)
        sync(bundle)
        bundle.replace(package)
        sync(package.parent)


def _is_complete(path: Path, build: Build) -> bool:
    return path.is_file() and path.stat().st_size == build.size and sha256_of(path.read_bytes()) == build.sha256


def write_request(state_dir: Path, signed: bytes, request: UpgradeTarget) -> None:
    """Store the requested version and its signed manifest durably; the request is written last."""
    folder = open_folder(state_dir)
    if signed:
        replace_file(folder / f"{request.version}.json", signed, mode=PRIVATE)
        for path in folder.glob("*.deb"):
            if path.name != f"{request.version}.deb":
                path.unlink(missing_ok=True)
                path.with_suffix(".json").unlink(missing_ok=True)
    replace_file(folder / WANTED, msgspec.json.encode(request), mode=PRIVATE)
