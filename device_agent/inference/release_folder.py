"""Files of a release on the board: a folder as `edge-server release export` writes it; a model of the device's own."""

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
    read_manifest,
)
from shared.protocol.messages import Spec

OWN = "own_model"
"""Under which a file of a device's own parameters says what they are of."""
MAX_HEADER_BYTES = 16 << 20


class OwnModel(msgspec.Struct, frozen=True, kw_only=True):
    """What a file of a device's own parameters says of them, which are beside it as safetensors.

    Attributes:
        model: The network and its options.
        run: That it was trained in.
        round: The last one that it learnt from.
        contents: Digest of the parameters, see `own_digest`.
    """

    model: Spec
    run: str
    round: int
    contents: str


@dataclass(frozen=True)
class ReleaseFiles:
    """Where a release lies.

    Attributes:
        manifest: The bytes of its manifest.
        parts: Its files, by the names that they have in a folder; whether they are whole is not known yet.
    """

    name: str
    version: int
    manifest: bytes
    parts: dict[str, Path]


def read_folder(folder: Path) -> ReleaseFiles:
    """Return the release in a folder.

    Raises:
        ConfigError: There is none, or it is of a newer format.
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
    """Return releases by their names.

    Raises:
        ConfigError: A folder holds none, or two hold the same model.
    """
    found = dict[str, ReleaseFiles]()
    for folder in folders:
        try:
            one = read_folder(Path(folder))
        except CorruptFile as error:
            raise ConfigError(f"serve.releases: {error}; export the release again") from error
        require_new(one.name, found)
        found[one.name] = one
    return found


def require_new(name: str, known: Container[str]) -> None:
    """Refuse a second folder of the same model.

    Raises:
        ConfigError: The model is among those that are known.
    """
    if name in known:
        raise ConfigError(f"serve.releases: two folders hold model {name!r}; name one of them")


def own_digest(parameters: Mapping[str, bytes | memoryview]) -> str:
    """Return the SHA-256 of a device's own parameters, by their names, as 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for name, data in sorted(parameters.items()):
        digest.update(f"{name}\n{len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()


def read_own(path: Path) -> OwnModel | None:
    """Return what a file says of a device's own parameters, which are not read; None where there is no file.

    Raises:
        CorruptFile: It cannot be read, or says nothing of the kind.
    """
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, MAX_HEADER_BYTES)))
        return msgspec.json.decode(header["__metadata__"][OWN], type=OwnModel)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, msgspec.MsgspecError) as error:
        raise CorruptFile(f"{path}: it does not say what parameters it holds: {error}") from error
