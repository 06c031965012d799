"""Releases of a site: manifests and parts under the digests of their content, written once and never changed.

    releases/blobs/SHA256            every part and every manifest
    releases/names/NAME/VERSION      one line, the digest of the manifest
    releases/names/NAME/VERSION.gone a version that was deleted, so that its number is never given again

What several releases have in common, such as the graph of their architecture, lies there once.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from edge_server.plan.data_folder import claim_data_folder
from shared.errors import ConfigError, CorruptFile, Unwritable
from shared.protocol.inference.release import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    ReleaseManifest,
    parse_reference,
    read_manifest,
    sha256_of,
    write_manifest,
)
from shared.protocol.packages import AGENT
from shared.runtime.durable import explain_disk_errors, replace_file
from shared.runtime.folder_lock import hold_lock

log = logging.getLogger(__name__)

FOLDER, BLOBS, NAMES, GONE = "releases", "blobs", "names", ".gone"
READ_ONLY = 0o400
REMEDY = "put the file back from a copy, or create the release anew from its run"
_DIGEST = re.compile(r"[0-9a-f]{64}")


class StoredRelease(NamedTuple):
    """A release and where it lies.

    Attributes:
        manifest: What it says of itself; its own digest was checked.
        folder: Of all releases of the site.
    """

    manifest: ReleaseManifest
    sha256: str
    folder: Path

    @property
    def run(self) -> str:
        """Name of the run that it is of."""
        return self.manifest.source.run

    def path(self, digest: str) -> Path:
        """Return where a part of it lies."""
        return self.folder / BLOBS / digest

    def content(self) -> bytes:
        """Return the manifest's bytes."""
        return self.path(self.sha256).read_bytes()

    def require_whole(self) -> None:
        """Compare every part with its digest.

        Raises:
            CorruptFile: One is gone or damaged.
        """
        verify(self)


def publish(data_dir: Path, draft: ReleaseManifest, parts: Mapping[str, bytes]) -> StoredRelease:
    """Keep a release under the next version of its name, whole or not at all.

    Where a version of that name is the same in all but its date, that one is returned.

    Args:
        draft: The manifest; its version does not count.
        parts: Content of all that it names, by digest.

    Raises:
        ConfigError: Another process is at work there, nothing can be written, or a newer version wrote there.
        Unwritable: The disk takes nothing more.
    """
    if draft.name == AGENT:
        raise ConfigError(f"no model may be called {AGENT}: under this name boards are offered the agent itself")
    folder = data_dir / FOLDER
    names = folder / NAMES / draft.name
    try:
        claim_data_folder(data_dir)
        with explain_disk_errors(folder):
            names.mkdir(parents=True, exist_ok=True)
            (folder / BLOBS).mkdir(exist_ok=True)
        with hold_lock(folder):
            for digest, data in parts.items():
                _keep(folder, digest, data)
            for version in _versions(folder, draft.name):
                if (existing := _readable(folder, draft.name, version)) and _is_same(existing.manifest, draft):
                    return existing
            manifest = msgspec.structs.replace(draft, version=_next_version(names))
            data = write_manifest(manifest)
            digest = sha256_of(data)
            _keep(folder, digest, data)
            replace_file(names / str(manifest.version), f"{digest}\n".encode())
    except Unwritable:
        raise
    except OSError as error:
        raise ConfigError(
            f"{error.filename or folder}: {error.strerror}; name a folder that you may write in"
        ) from error
    return StoredRelease(manifest, digest, folder)


def _keep(folder: Path, digest: str, data: bytes) -> None:
    """Write content under its digest unless it is there and whole."""
    path = folder / BLOBS / digest
    if not path.exists() or _digest_of(path) != digest:
        replace_file(path, data)
        path.chmod(READ_ONLY)


def _is_same(existing: ReleaseManifest, draft: ReleaseManifest) -> bool:
    """Tell whether two say the same, but for when it was, and how fast it was that time."""
    alike = msgspec.structs.replace(existing, version=draft.version, created=draft.created)
    if existing.reduction and draft.reduction:
        times = {name: getattr(draft.reduction, name) for name in ("seconds_before", "seconds_after")}
        alike = msgspec.structs.replace(alike, reduction=msgspec.structs.replace(existing.reduction, **times))
    return write_manifest(alike) == write_manifest(draft)


def _next_version(names: Path) -> int:
    numbers = [int(path.name.removesuffix(GONE)) for path in names.iterdir() if path.name.removesuffix(GONE).isdecimal()]
    return max(numbers, default=0) + 1


def _versions(folder: Path, name: str) -> list[int]:
    """Return the versions of a name that there are, in order."""
    names = folder / NAMES / name
    return sorted(int(path.name) for path in names.iterdir() if path.name.isdecimal()) if names.is_dir() else []


def find_release(data_dir: Path, text: str) -> StoredRelease:
    """Return a release that is named `NAME/VERSION`, or the newest of `NAME`.

    Raises:
        ConfigError: There is none.
        CorruptFile: Its manifest is damaged.
    """
    name, version = parse_reference(text)
    folder = data_dir / FOLDER
    versions = _versions(folder, name)
    if not versions or (version and version not in versions):
        raise ConfigError(f"no release {text!r} in {folder}; `edge-server release list` lists those there are")
    return _read(folder, name, version or versions[-1])


def _read(folder: Path, name: str, version: int) -> StoredRelease:
    """Return a release of which the manifest is whole."""
    reference, path = f"{name}/{version}", folder / NAMES / name / str(version)
    digest = path.read_text("ascii", "replace").strip()
    if not _DIGEST.fullmatch(digest):
        raise CorruptFile(f"release {reference}: {path} holds no digest; {REMEDY}")
    blob = folder / BLOBS / digest
    _require_whole(blob, digest, f"release {reference}: its manifest", MAX_MANIFEST_BYTES)
    manifest = read_manifest(blob.read_bytes(), f"release {reference}: {blob}")
    if (manifest.name, manifest.version) != (name, version):
        raise CorruptFile(f"release {reference}: {path} names the manifest of {manifest.reference}; {REMEDY}")
    return StoredRelease(manifest, digest, folder)


def _readable(folder: Path, name: str, version: int) -> StoredRelease | None:
    try:
        return _read(folder, name, version)
    except (ConfigError, CorruptFile) as error:
        log.warning("%s", error)
        return None


def _require_whole(path: Path, digest: str, what: str, most: int | None = None) -> None:
    """Refuse a file that is not there or does not have its digest."""
    if not path.exists():
        raise CorruptFile(f"{what} is gone: {path}; {REMEDY}")
    if (most is not None and path.stat().st_size > most) or _digest_of(path) != digest:
        raise CorruptFile(f"{what} is damaged: {path} does not have its digest; {REMEDY}")


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def all_releases(data_dir: Path) -> list[StoredRelease]:
    """Return every release whose manifest is whole, by name and version; others are reported and left alone."""
    folder = data_dir / FOLDER
    names = sorted(path.name for path in (folder / NAMES).iterdir()) if (folder / NAMES).is_dir() else []
    releases = (_readable(folder, name, version) for name in names for version in _versions(folder, name))
    return [release for release in releases if release]


def verify(stored: StoredRelease) -> None:
    """Compare every part with its digest.

    Raises:
        CorruptFile: One is gone or damaged.
    """
    for name, part in stored.manifest.parts.items():
        _require_whole(stored.path(part.sha256), part.sha256, f"release {stored.manifest.reference}: its {name}")


def export_release(stored: StoredRelease, out: Path) -> None:
    """Write a release as a folder: its manifest and its parts under names for people; all of it or nothing.

    Args:
        out: A new folder.

    Raises:
        ConfigError: There is something already, or no folder to put it in, or nothing can be written.
        CorruptFile: A part is gone or damaged.
    """
    if out.exists():
        raise ConfigError(f"{out} is there already; name a new folder")
    if not out.parent.is_dir():
        raise ConfigError(f"{out}: there is no folder {out.parent}; make it, or name a folder in one that is there")
    verify(stored)
    partial = out.with_name(f".{out.name}.part-{os.getpid()}")
    try:
        with explain_disk_errors(out):
            partial.mkdir()
            for name, part in stored.manifest.parts.items():
                shutil.copyfile(stored.path(part.sha256), partial / name)
            (partial / MANIFEST).write_bytes(stored.path(stored.sha256).read_bytes())
            partial.rename(out)
    except Unwritable:
        raise
    except OSError as error:
        raise ConfigError(f"{out}: {error.strerror}; name another folder") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def delete_release(data_dir: Path, text: str) -> int:
    """Forget a release, and what no other one has in common with it; return the bytes that came free.

    Args:
        text: `NAME/VERSION`; a damaged one may be deleted too.

    Raises:
        ConfigError: There is none, no version is named, or another process is at work there.
    """
    name, version = parse_reference(text)
    folder = data_dir / FOLDER
    if version not in _versions(folder, name):
        raise ConfigError(f"no release {text!r} in {folder}; write NAME/VERSION as `edge-server release list` does")
    with hold_lock(folder):
        path = folder / NAMES / name / str(version)
        path.rename(path.with_name(path.name + GONE))
        return _collect(folder)


def _collect(folder: Path) -> int:
    """Remove what no release names; nothing while the manifest of one cannot be read."""
    named = set[str]()
    for name in (folder / NAMES).iterdir():
        for version in _versions(folder, name.name):
            if not (release := _readable(folder, name.name, version)):
                return 0
            named |= {release.sha256, *(part.sha256 for part in release.manifest.parts.values())}
    freed = 0
    for path in (folder / BLOBS).iterdir():
        if path.name not in named:
            freed += path.stat().st_size
            path.unlink()
    return freed
