"""Installer program: fetch, verify and unpack one version of a project.

The manifest must be signed by the site that this board joined, under the root that the board has pinned; the wheel must
be the one that the manifest names, with nothing but the project's own files. It is unpacked beside the other versions
and renamed once all of it is on the disk.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from device_agent.identity import credentials
from device_agent.identity.credentials import CA, CERTIFICATE, KEY, Membership
from device_agent.projects.provide import EXIT_REFUSED, FOLDER, NO_CERTIFICATES
from device_agent.upgrade.trusted_roots import find_root
from device_agent.upgrade.versions import Versions
from shared.errors import ConfigError, CorruptFile, FieldFleetError, Unreachable, WireError
from shared.projects.manifest import ProjectManifest, verify_project
from shared.projects.wheel import read_wheel
from shared.protocol.packages import MOST_SIGNED, decode_signed_manifest
from shared.runtime.folder_lock import FolderLock
from shared.runtime.processes import die_with_parent
from shared.runtime.support.fetch import download, read_url
from shared.runtime.support.table import Wheel

EXIT_LATER = 1
RETAINED = 3
"""Versions of a project that remain beside a new one."""
PRIVATE_FOLDER = 0o700


def main(arguments: Sequence[str]) -> int:
    """Install a version; return 0, `EXIT_REFUSED`, or `EXIT_LATER` if another attempt may succeed."""
    die_with_parent()
    state_dir, name, version, *retained = arguments
    try:
        install(Path(state_dir), name, version, retained)
    except (ConfigError, CorruptFile, WireError) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_REFUSED
    except (FieldFleetError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_LATER
    return 0


def install(state_dir: Path, name: str, version: str, retained: Sequence[str] = ()) -> None:
    """Install a version of a project from the gateway of the board's site, unless it is there.

    Args:
        retained: Further versions that stay installed.

    Raises:
        ConfigError: The board has not joined a site, or the gateway does not offer the version.
        CorruptFile: The wheel is damaged or has unexpected content.
        WireError: The manifest is not signed by this board's site, or is of another project.
        Unreachable: The gateway does not answer, or another installer runs.
        Unwritable: The disk is full or read-only.
    """
    identity = state_dir / credentials.FOLDER / credentials.CURRENT
    membership = credentials.read_membership(identity)
    if membership is None:
        raise ConfigError(NO_CERTIFICATES)
    home = state_dir / FOLDER / name
    home.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    with _hold_lock(home):
        versions = Versions(home)
        if versions.is_installed(version):
            return
        manifest = _fetch_manifest(identity, membership, name, version)
        versions.require_room(manifest.size)
        wheel = _fetch_wheel(identity, membership, manifest, home)
        entries = read_wheel(wheel, name, version)
        versions.require_room(sum(len(entry.content) for entry in entries))
        versions.install(version, manifest.sha256, entries)
        versions.remove_unused([version, *retained, *_newest(home)])


@contextmanager
def _hold_lock(home: Path) -> Iterator[None]:
    """Hold the lock of a project's folder; an installer that an earlier agent started may still run."""
    lock = FolderLock(home)
    try:
        lock.take()
    except ConfigError as error:
        raise Unreachable(str(error)) from error
    try:
        yield
    finally:
        lock.release()


def _newest(home: Path) -> list[str]:
    """Return the versions installed last."""
    folders = [path for path in home.iterdir() if path.is_dir() and not path.name.startswith(".")]
    return [path.name for path in sorted(folders, key=lambda path: -path.stat().st_mtime)[:RETAINED]]


def _fetch_manifest(identity: Path, membership: Membership, name: str, version: str) -> ProjectManifest:
    root = find_root((identity / CA).read_bytes(), membership.root)
    data = read_url(_address(membership, f"{name}/{version}.json"), MOST_SIGNED, *_credentials(identity))
    if data is None:
        raise ConfigError(
            f"the gateway of site {membership.site} does not offer it to this board; run `edge-server project publish` "
            "there, or enrol the board again if it was revoked"
        )
    manifest = verify_project(decode_signed_manifest(data), root)
    if (manifest.name, manifest.version, manifest.site) != (name, version, membership.site):
        raise WireError(
            f"the manifest is of {manifest.name} {manifest.version} for site {manifest.site}", reason="malformed"
        )
    return manifest


def _fetch_wheel(identity: Path, membership: Membership, manifest: ProjectManifest, home: Path) -> bytes:
    """Return the wheel that a manifest names."""
    place = home / f".{manifest.file}"
    for partial in home.glob(".*.whl*"):  # of a version that nobody asks for any more
        if not partial.name.startswith(place.name):
            partial.unlink()
    wheel = Wheel(file=manifest.file, bytes=manifest.size, unpacked=0, sha256=manifest.sha256)
    ca, pair = _credentials(identity)
    try:
        download(_address(membership, f"{manifest.name}/{manifest.file}"), wheel, place, ca, pair)
        data = place.read_bytes()
    finally:
        place.unlink(missing_ok=True)
    if len(data) != manifest.size or hashlib.sha256(data).hexdigest() != manifest.sha256:
        raise CorruptFile(f"{manifest.file} differs from what the site signed")
    return data


def _address(membership: Membership, path: str) -> str:
    host = f"[{membership.host}]" if ":" in membership.host else membership.host
    return f"https://{host}:{membership.port}/packages/projects/{path}"


def _credentials(identity: Path) -> tuple[str, tuple[str, str]]:
    """Return the files of the site's CA, and of this board's certificate and key."""
    return str(identity / CA), (str(identity / CERTIFICATE), str(identity / KEY))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
