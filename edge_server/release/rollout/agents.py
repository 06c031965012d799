"""Adapter that presents agent versions to rollouts as releases.

To a rollout, an agent version is a release of `fieldfleet-agent` whose version is the gateway's serial number and whose
parts are packages, one for each kind of board; a board requests only its package. The manifest is signed by the site.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from edge_server.gateway.packages.store import find_version, packages_folder, read_index
from shared.errors import ConfigError, CorruptFile
from shared.protocol.inference.release import ParameterSpec, ReleasePart, sha256_of
from shared.protocol.packages import AGENT, PackageManifest, encode_signed_manifest
from shared.runtime.file_digest import file_sha256


@dataclass(frozen=True)
class AgentManifest:
    """A package manifest with the attributes of a release manifest that rollouts read.

    Attributes:
        version: Serial number in the gateway's package index.
        parts: Packages by file name.
    """

    version: int
    parts: Mapping[str, ReleasePart]
    name: str = AGENT
    tensors: tuple[ParameterSpec, ...] = ()

    @property
    def reference(self) -> str:
        """Release reference, `NAME/VERSION`."""
        return f"{self.name}/{self.version}"

    @property
    def parameters(self) -> ReleasePart:
        """The first package, as a placeholder: it is not read, since without tensors no header is requested."""
        return next(iter(self.parts.values()))

    @staticmethod
    def of_package(package: PackageManifest) -> AgentManifest:
        """Return the manifest of an agent version."""
        parts = {build.file: ReleasePart(sha256=build.sha256, size=build.size) for build in package.builds}
        return AgentManifest(package.serial, parts)


@dataclass(frozen=True)
class StoredAgent:
    """An agent version in the gateway's package store.

    Attributes:
        signed: Signed manifest, as sent to boards.
        folder: Folder of the gateway's packages.
        run: Always empty: no run trained an agent.
    """

    manifest: AgentManifest
    signed: bytes
    folder: Path
    run: str = ""

    @property
    def sha256(self) -> str:
        """Digest of the signed manifest."""
        return sha256_of(self.signed)

    def content(self) -> bytes:
        """Return the signed manifest."""
        return self.signed

    def path(self, digest: str) -> Path:
        """Return the path of the package with this digest."""
        names = {part.sha256: name for name, part in self.manifest.parts.items()}
        return self.folder / names[digest]

    def verify_parts(self) -> None:
        """Verify every package against its digest.

        Raises:
            CorruptFile: A package is missing or damaged.
        """
        for name, part in self.manifest.parts.items():
            path = self.folder / name
            if not path.is_file() or file_sha256(path) != part.sha256:
                remedy = "run `edge-server packages remove VERSION`, then `packages add` again"
                raise CorruptFile(f"{path} is missing or does not match the signed manifest; {remedy}")


def find_agent(site: Path, version: str) -> StoredAgent:
    """Find an agent version in a gateway's package index.

    Args:
        site: Folder of the site.
        version: A version such as 0.4.0, or a release reference such as fieldfleet-agent/3.

    Raises:
        ConfigError: No such version exists.
    """
    index = read_index(site)
    manifests = index.manifests()
    by_number = {f"{AGENT}/{manifest.serial}": manifest for manifest in manifests}
    manifest = by_number.get(version) or find_version(manifests, version.removeprefix(f"{AGENT}/"))
    signed = index.releases[manifests.index(manifest)]
    return StoredAgent(AgentManifest.of_package(manifest), encode_signed_manifest(signed), packages_folder(site))


def require_site_folder(gateway: str) -> Path:
    """Return the site folder set in `server.toml`.

    Raises:
        ConfigError: `gateway` is not set.
    """
    if not gateway:
        raise ConfigError(
            "server.toml: `gateway` is not set; set it to the folder that `edge-server site init` created"
        )
    return Path(gateway)
