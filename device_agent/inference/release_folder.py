"""Exported release folders, and files of the device's own model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shared.errors import ConfigError, CorruptFile
from shared.protocol.inference.release import (
    BOTTOM,
    GRAPH,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    PARAMETERS,
    PROBES,
    ReleaseManifest,
    read_manifest,
)
from shared.protocol.messages import ProjectVersion, Spec

OWN = "own_model"
"""Metadata key of the own-model header in a safetensors file."""
MAX_HEADER_BYTES = 16 << 20


class OwnModel(msgspec.Struct, frozen=True, kw_only=True):
    """Header of a safetensors file with the device's own parameters.

    Attributes:
        model: Network and its options.
        run: Run in which it was trained.
        round: Last round of its training.
        contents: Digest of the parameters, see `compute_own_digest`.
        project: Project with the code of the network; None without one, or if an earlier agent wrote it.
    """

    model: Spec
    run: str
    round: int
    contents: str
    project: ProjectVersion | None = None

    def matches(self, release: ReleaseManifest) -> bool:
        """Check that a release has this network, by the same code as far as both name it."""
        expected = release.source.project or self.project
        return self.model == release.model and (self.project or expected) == expected


@dataclass(frozen=True)
class ReleaseFiles:
    """Location of a release on disk.

    Attributes:
        parts: Paths of its files by their names in an exported folder; not verified yet.
    """

    name: str
    version: int
    manifest: bytes
    parts: dict[str, Path]


def read_folder(folder: Path) -> ReleaseFiles:
    """Return the release in a folder.

    Raises:
        ConfigError: The folder holds no release, or one of a newer format.
        CorruptFile: Its manifest is damaged.
    """
    path = folder / MANIFEST
    try:
        with path.open("rb") as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"serve.releases: {path}: {error.strerror}; name a folder that `edge-server release export` wrote"
        ) from error
    manifest = read_manifest(data, str(path))
    parts = {name: folder / name for name in (GRAPH, PARAMETERS, PROBES, *([BOTTOM] if manifest.halves else []))}
    return ReleaseFiles(manifest.name, manifest.version, data, parts)


def read_folders(folders: Iterable[str]) -> dict[str, ReleaseFiles]:
    """Return the releases in several folders by model name.

    Raises:
        ConfigError: A folder holds no release, or two hold the same model.
    """
    releases = dict[str, ReleaseFiles]()
    for folder in folders:
        try:
            release = read_folder(Path(folder))
        except CorruptFile as error:
            raise ConfigError(f"serve.releases: {error}; export the release again") from error
        require_new(release.name, releases)
        releases[release.name] = release
    return releases


def require_new(name: str, names: Container[str]) -> None:
    """Refuse a second folder of the same model.

    Raises:
        ConfigError: `names` contains the model already.
    """
    if name in names:
        raise ConfigError(f"serve.releases: two folders hold model {name!r}; name one of them")


def compute_own_digest(parameters: Mapping[str, bytes | memoryview]) -> str:
    """Return the SHA-256 of a device's own parameters by name, as 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for name, data in sorted(parameters.items()):
        digest.update(f"{name}\n{len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()


def read_own_header(path: Path) -> OwnModel | None:
    """Return the header of a file of own parameters without reading these; None if there is no file.

    Raises:
        CorruptFile: The header is unreadable or missing.
    """
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, MAX_HEADER_BYTES)))
        return msgspec.json.decode(header["__metadata__"][OWN], type=OwnModel)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, msgspec.MsgspecError) as error:
        raise CorruptFile(f"{path}: the header of its parameters is unreadable: {error}") from error
