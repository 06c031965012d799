"""Versions of the agent as rollouts offer them: a manifest that the site signed, and a package a kind of board.

To a rollout a version of the agent is a release of the name `fieldfleet-agent`, whose number is that under which the
gateway took it in, and whose parts are packages: a board asks for its own alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from edge_server.gateway.packages.store import file_sha256, find_version, packages_folder, read_index
from shared.errors import ConfigError, CorruptFile
from shared.protocol.inference.release import ParameterSpec, ReleasePart, sha256_of
from shared.protocol.packages import AGENT, PackageManifest, write_signed


@dataclass(frozen=True)
class AgentParts:
    """What a rollout reads of a manifest."""

    package: PackageManifest

    @property
    def name(self) -> str:
        """Under which it is offered."""
        return AGENT

    @property
    def version(self) -> int:
        """Its number among the gateway's versions."""
        return self.package.serial

    @property
    def reference(self) -> str:
        """As rollouts name it."""
        return f"{AGENT}/{self.version}"

    @property
    def parts(self) -> Mapping[str, ReleasePart]:
        """Its packages, by their files' names."""
        return {build.file: ReleasePart(sha256=build.sha256, size=build.size) for build in self.package.builds}

    @property
    def parameters(self) -> ReleasePart:
        """None of its own; its first package stands here, since what has no tensors has no header either."""
        return next(iter(self.parts.values()))

    @property
    def tensors(self) -> tuple[ParameterSpec, ...]:
        """None."""
        return ()


@dataclass(frozen=True)
class StoredAgent:
    """A version of the agent and where it lies.

    Attributes:
        manifest: What it says of itself.
        signed: The signed manifest, as boards get it.
        folder: Of the gateway's packages.
    """

    manifest: AgentParts
    signed: bytes
    folder: Path

    @property
    def sha256(self) -> str:
        """Of the signed manifest."""
        return sha256_of(self.signed)

    @property
    def run(self) -> str:
        """Of no run."""
        return ""

    def content(self) -> bytes:
        """Return what is offered to boards."""
        return self.signed

    def path(self, digest: str) -> Path:
        """Return where a package lies."""
        names = {part.sha256: name for name, part in self.manifest.parts.items()}
        return self.folder / names[digest]

    def require_whole(self) -> None:
        """Compare every package with its digest.

        Raises:
            CorruptFile: One is gone or damaged.
        """
        for name, part in self.manifest.parts.items():
            path = self.folder / name
            if not path.is_file() or file_sha256(path) != part.sha256:
                remedy = "`edge-server packages remove VERSION`, then `packages add` it anew"
                raise CorruptFile(f"{path} is gone, or not what was signed; {remedy}")


def find_agent(site: Path, version: str) -> StoredAgent:
    """Return a version of the agent among a gateway's packages.

    Args:
        site: The folder of the site.
        version: Such as 0.4.0, or the number under which a rollout knows it, such as fieldfleet-agent/3.

    Raises:
        ConfigError: There is none.
    """
    index = read_index(site)
    manifests = index.manifests()
    by_number = {AgentParts(manifest).reference: manifest for manifest in manifests}
    manifest = by_number.get(version) or find_version(manifests, version.removeprefix(f"{AGENT}/"))
    signed = index.releases[manifests.index(manifest)]
    return StoredAgent(AgentParts(manifest), write_signed(signed), packages_folder(site))


def site_of(gateway: str) -> Path:
    """Return the folder of the site that a server's file names.

    Raises:
        ConfigError: It names none.
    """
    if not gateway:
        raise ConfigError(
            "the server's file names no site: set `gateway` to the folder that `edge-server site init` made"
        )
    return Path(gateway)
