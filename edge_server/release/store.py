"""Content-addressed, immutable release store of a site.

    releases/blobs/SHA256            every part and every manifest
    releases/names/NAME/VERSION      one line, the digest of the manifest
    releases/names/NAME/VERSION.gone a deleted version, so that its number is not reused

Releases share equal parts, such as the graph of their architecture.
"""

from __future__ import annotations

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
from shared.runtime.file_digest import file_sha256
from shared.runtime.folder_lock import hold_lock

log = logging.getLogger(__name__)

FOLDER, BLOBS, NAMES, GONE = "releases", "blobs", "names", ".gone"
READ_ONLY = 0o400
REMEDY = "restore the file from a backup, or create the release again from its run"
_DIGEST = re.compile(r"[0-9a-f]{64}")


class StoredRelease(NamedTuple):
    """A release in the store.

    Attributes:
        sha256: Digest of the manifest, against which it was verified.
        folder: Root of the store, shared by all releases.
    """

    manifest: ReleaseManifest
    sha256: str
    folder: Path

    @property
    def run(self) -> str:
        """Name of the run that trained the model."""
        return self.manifest.source.run

    def path(self, digest: str) -> Path:
        """Return the path of a part."""
        return self.folder / BLOBS / digest

    def content(self) -> bytes:
        """Read the manifest's bytes."""
        return self.path(self.sha256).read_bytes()

    def verify_parts(self) -> None:
        """Verify every part as `verify` does."""
        verify(self)


def publish(data_dir: Path, draft: ReleaseManifest, parts: Mapping[str, bytes]) -> StoredRelease:
    """Store a release atomically under the next version of its name.

    An existing version that differs only in date and measured times is returned instead.

    Args:
        draft: Its version is ignored.
        parts: Content of all parts in the manifest, by digest.

    Raises:
        ConfigError: Another process holds the store, the folder is not writable, or a newer fieldfleet wrote there.
        Unwritable: The disk is full.
    """
    if draft.name == AGENT:
        raise ConfigError(f"release name {AGENT!r} is reserved for versions of the agent; choose another name")
    folder = data_dir / FOLDER
    names = folder / NAMES / draft.name
    try:
        claim_data_folder(data_dir)
        with explain_disk_errors(folder):
            names.mkdir(parents=True, exist_ok=True)
            (folder / BLOBS).mkdir(exist_ok=True)
        with hold_lock(folder):
            for digest, data in parts.items():
                _write_blob(folder, digest, data)
            for version in _versions(folder, draft.name):
                if (existing := _try_read(folder, draft.name, version)) and _is_same(existing.manifest, draft):
                    return existing
            manifest = msgspec.structs.replace(draft, version=_next_version(names))
            data = write_manifest(manifest)
            digest = sha256_of(data)
            _write_blob(folder, digest, data)
            replace_file(names / str(manifest.version), f"{digest}\n".encode())
    except Unwritable:
        raise
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: {error.strerror}; choose a writable folder") from error
    return StoredRelease(manifest, digest, folder)


def _write_blob(folder: Path, digest: str, data: bytes) -> None:
    """Write content under its digest unless an undamaged copy exists."""
    path = folder / BLOBS / digest
    if not path.exists() or file_sha256(path) != digest:
        replace_file(path, data)
        path.chmod(READ_ONLY)


def _is_same(existing: ReleaseManifest, draft: ReleaseManifest) -> bool:
    """Compare two manifests, ignoring version, date and measured times."""
    alike = msgspec.structs.replace(existing, version=draft.version, created=draft.created)
    if existing.reduction and draft.reduction:
        times = {name: getattr(draft.reduction, name) for name in ("seconds_before", "seconds_after")}
        alike = msgspec.structs.replace(alike, reduction=msgspec.structs.replace(existing.reduction, **times))
    return write_manifest(alike) == write_manifest(draft)


def _next_version(names: Path) -> int:
    numbers = [
        int(path.name.removesuffix(GONE)) for path in names.iterdir() if path.name.removesuffix(GONE).isdecimal()
    ]
    return max(numbers, default=0) + 1


def _versions(folder: Path, name: str) -> list[int]:
    """List the existing versions of a name, ascending."""
    names = folder / NAMES / name
    return sorted(int(path.name) for path in names.iterdir() if path.name.isdecimal()) if names.is_dir() else []


def find_release(data_dir: Path, text: str) -> StoredRelease:
    """Read the release `NAME/VERSION`, or the newest version of `NAME`.

    Raises:
        ConfigError: No such release exists.
        CorruptFile: Its manifest is damaged.
    """
    name, version = parse_reference(text)
    folder = data_dir / FOLDER
    versions = _versions(folder, name)
    if not versions or (version and version not in versions):
        raise ConfigError(f"no release {text!r} in {folder}; `edge-server release list` shows all")
    return _read(folder, name, version or versions[-1])


def _read(folder: Path, name: str, version: int) -> StoredRelease:
    """Read a release after verifying its manifest's digest."""
    reference, path = f"{name}/{version}", folder / NAMES / name / str(version)
    digest = path.read_text("ascii", "replace").strip()
    if not _DIGEST.fullmatch(digest):
        raise CorruptFile(f"release {reference}: {path} is not a SHA-256 digest; {REMEDY}")
    blob = folder / BLOBS / digest
    _require_digest(blob, digest, f"release {reference}: its manifest", MAX_MANIFEST_BYTES)
    manifest = read_manifest(blob.read_bytes(), f"release {reference}: {blob}")
    if (manifest.name, manifest.version) != (name, version):
        raise CorruptFile(f"release {reference}: {path} names the manifest of {manifest.reference}; {REMEDY}")
    return StoredRelease(manifest, digest, folder)


def _try_read(folder: Path, name: str, version: int) -> StoredRelease | None:
    try:
        return _read(folder, name, version)
    except (ConfigError, CorruptFile) as error:
        log.warning("%s", error)
        return None


def _require_digest(path: Path, digest: str, what: str, most: int | None = None) -> None:
    """Reject a file that is missing, longer than `most` bytes, or does not match its digest."""
    if not path.exists():
        raise CorruptFile(f"{what} is missing: {path}; {REMEDY}")
    if (most is not None and path.stat().st_size > most) or file_sha256(path) != digest:
        raise CorruptFile(f"{what} is damaged: {path} does not match its digest; {REMEDY}")


def list_releases(data_dir: Path) -> list[StoredRelease]:
    """List all releases by name and version; log and skip those whose manifest is damaged."""
    folder = data_dir / FOLDER
    names = sorted(path.name for path in (folder / NAMES).iterdir()) if (folder / NAMES).is_dir() else []
    releases = (_try_read(folder, name, version) for name in names for version in _versions(folder, name))
    return [release for release in releases if release]


def verify(stored: StoredRelease) -> None:
    """Verify every part against its digest.

    Raises:
        CorruptFile: A part is missing or damaged.
    """
    for name, part in stored.manifest.parts.items():
        _require_digest(stored.path(part.sha256), part.sha256, f"release {stored.manifest.reference}: its {name}")


def export_release(stored: StoredRelease, out: Path) -> None:
    """Copy a release's manifest and parts, under readable names, into a new folder; atomic.

    Raises:
        ConfigError: `out` exists, its parent does not, or it cannot be written.
        CorruptFile: A part is missing or damaged.
    """
    if out.exists():
        raise ConfigError(f"{out} exists already; name a new folder")
    if not out.parent.is_dir():
        raise ConfigError(f"{out}: folder {out.parent} does not exist; create it, or choose another folder")
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
    """Delete a release and the parts that no other release uses; return the bytes freed.

    Args:
        text: `NAME/VERSION`; the release may be damaged.

    Raises:
        ConfigError: No such release exists, the version is missing, or another process holds the store.
    """
    name, version = parse_reference(text)
    folder = data_dir / FOLDER
    if version not in _versions(folder, name):
        raise ConfigError(f"no release {text!r} in {folder}; write NAME/VERSION as `edge-server release list` does")
    with hold_lock(folder):
        path = folder / NAMES / name / str(version)
        path.rename(path.with_name(path.name + GONE))
        return _collect_garbage(folder)


def _collect_garbage(folder: Path) -> int:
    """Remove blobs that no release uses; nothing if the manifest of any release is unreadable."""
    named = set[str]()
    for name in (folder / NAMES).iterdir():
        for version in _versions(folder, name.name):
            if not (release := _try_read(folder, name.name, version)):
                return 0
            named |= {release.sha256, *(part.sha256 for part in release.manifest.parts.values())}
    freed = 0
    for path in (folder / BLOBS).iterdir():
        if path.name not in named:
            freed += path.stat().st_size
            path.unlink()
    return freed
