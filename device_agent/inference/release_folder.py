"""Files of a release on the board: a folder as `edge-server release export` writes it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigError, CorruptFile
from shared.protocol.release import BOTTOM, GRAPH, MANIFEST, MAX_MANIFEST_BYTES, PARAMETERS, PROBES, read_manifest


@dataclass(frozen=True)
class ReleaseFiles:
    """Where a release lies.

    Attributes:
        name: Of the model.
        version: Of it.
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
        if one.name in found:
            raise ConfigError(f"serve.releases: two folders hold model {one.name!r}; name one of them")
        found[one.name] = one
    return found
