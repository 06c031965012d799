"""Package store of a gateway: files, and a signed manifest for each version.

    packages/index.json              signed manifests, and wheels with their SHA-256
    packages/FILE.deb                packages, named as in the manifests
    packages/wheels/FILE.whl         wheels for the boards' `device-agent setup`
    packages/projects/NAME/FILE.whl  wheels of projects, see `packages.projects`

Files are written atomically and never change; a file that is not in the index is not served.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec

from edge_server.gateway.certificate_files import split_certificates
from edge_server.gateway.packages.deb import DebFacts, read_deb
from edge_server.gateway.site_folder import FOLDER as FOLDER_MODE
from edge_server.gateway.site_folder import PUBLIC, SiteFolder, owner_ids
from edge_server.gateway.state import lock_site, read_state
from shared.errors import ConfigError, FieldFleetError
from shared.projects.manifest import ProjectManifest, decode_project, verify_project
from shared.protocol.packages import (
    AGENT,
    MOST_BUILDS,
    Build,
    PackageManifest,
    SignedManifest,
    decode_manifest,
    sign,
    verify,
)
from shared.runtime.clock import utc_stamp
from shared.runtime.durable import explain_disk_errors, replace_file, sync
from shared.runtime.file_digest import file_sha256

PACKAGES, INDEX, WHEELS, LOCK = "packages", "index.json", "wheels", ".packages.lock"
PROJECTS = "projects"
FORMAT = 1
MOST_INDEX, MOST_RELEASES, MOST_WHEELS = 16 << 20, 64, 1024
MOST_READ_AT_ONCE = 2
"""Packages read at once; each takes the 64 MiB of its compression's dictionary."""


class WheelFile(msgspec.Struct, frozen=True, kw_only=True):
    """A wheel: file name, SHA-256 (hexadecimal), size in bytes."""

    file: str
    sha256: str
    size: int


class PackageIndex(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a package store.

    Attributes:
        next_serial: Serial number of the next version; never reused.
        releases: Signed manifests, the oldest first.
        wheels: Wheels, sorted by file name.
        projects: Signed manifests of projects, the oldest first.
    """

    format: int = FORMAT
    next_serial: int = 1
    releases: tuple[SignedManifest, ...] = ()
    wheels: tuple[WheelFile, ...] = ()
    projects: tuple[SignedManifest, ...] = ()

    def manifests(self) -> list[PackageManifest]:
        """Return the parsed manifests, without verifying their signatures.

        Raises:
            ConfigError: One is of a newer format.
            WireError: One is malformed.
        """
        return [decode_manifest(signed.manifest) for signed in self.releases]

    def project_manifests(self) -> list[ProjectManifest]:
        """Return the parsed manifests of projects, without verifying their signatures; raises as `manifests`."""
        return [decode_project(signed.manifest) for signed in self.projects]


def packages_folder(site: Path) -> Path:
    """Return the folder of a site's packages."""
    return site / PACKAGES


def read_index(site: Path) -> PackageIndex:
    """Read the index; empty if no package was ever added.

    Raises:
        ConfigError: The file is damaged, or of a newer version.
    """
    path = packages_folder(site) / INDEX
    try:
        with path.open("rb") as file:
            index = msgspec.json.decode(file.read(MOST_INDEX), type=PackageIndex)
        if index.format > FORMAT:
            raise ConfigError(f"{path}: format {index.format} is newer than {FORMAT}: update this program")
        index.manifests()
        index.project_manifests()
    except FileNotFoundError:
        return PackageIndex()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; run this as root or the site's user") from error
    except (msgspec.MsgspecError, ValueError, RecursionError, FieldFleetError) as error:
        if isinstance(error, ConfigError):
            raise
        remedy = "move the folder away and add the packages again"
        raise ConfigError(f"{path}: not an index of packages ({error}); {remedy}") from error
    return index


@contextmanager
def edit_index(site: SiteFolder) -> Iterator[PackageIndex]:
    """Lock a site's packages during the block; yield the index."""
    read_state(site.path)
    with lock_site(site.path, LOCK):
        try:
            make_folder(site, packages_folder(site.path))
        except OSError as error:
            raise ConfigError(f"{error.filename}: {error.strerror}; run this as root or the site's user") from error
        yield read_index(site.path)


def make_folder(site: SiteFolder, folder: Path) -> None:
    """Create a folder of the store, unless it exists."""
    if not folder.is_dir():
        folder.mkdir()
        folder.chmod(FOLDER_MODE)
        if owner := owner_ids(site.server_user):
            os.chown(folder, owner.uid, owner.gid)


def write_index(site: SiteFolder, index: PackageIndex) -> None:
    """Write the index; the caller holds the lock."""
    data = msgspec.json.format(msgspec.json.encode(index), indent=1) + b"\n"
    path = packages_folder(site.path) / INDEX
    replace_file(path, data, mode=PUBLIC, owner=owner_ids(site.server_user))


def read_debs(paths: Sequence[Path]) -> list[tuple[Path, DebFacts]]:
    """Return paths and metadata of packages; unpacking dominates, so threads share it.

    Raises:
        ConfigError: One is not a package of the agent, or cannot be read.
    """
    with ThreadPoolExecutor(MOST_READ_AT_ONCE) as pool:
        return list(zip(paths, pool.map(read_deb, paths), strict=True))


def add_packages(site: SiteFolder, paths: Sequence[Path]) -> list[PackageManifest]:
    """Add and sign packages; return the manifests of their versions.

    Args:
        paths: Files of packages; several may be of one version.

    Raises:
        ConfigError: One is not a package of the agent, or as `add_parsed_packages`.
        Unwritable: The disk is full or read-only.
    """
    return add_parsed_packages(site, read_debs(paths))


def add_parsed_packages(site: SiteFolder, packages: Sequence[tuple[Path, DebFacts]]) -> list[PackageManifest]:
    """Add and sign packages that have been read; return the manifests of their versions.

    Raises:
        ConfigError: A different package of the same kind and version exists, or signing fails.
        Unwritable: The disk is full or read-only.
    """
    changed = set[str]()
    with edit_index(site) as index:
        after = index
        for path, facts in packages:
            after = _with_package(site, after, path, facts)
            changed.add(facts.version)
        write_index(site, after)
    return [manifest for manifest in after.manifests() if manifest.version in changed]


def _with_package(site: SiteFolder, index: PackageIndex, path: Path, facts: DebFacts) -> PackageIndex:
    build = _build_of(path, facts)
    versions = {manifest.version: manifest for manifest in index.manifests()}
    before = versions.get(facts.version)
    others = before.builds if before else ()
    same = [other for other in others if (other.arch, other.python) == (build.arch, build.python)]
    if same and same[0].sha256 != build.sha256:
        problem = f"{path.name}: {same[0].file} exists already, with the same version and different content"
        raise ConfigError(f"{problem}; build it as another version, or remove the existing one first")
    if len(versions) >= MOST_RELEASES and not before:
        raise ConfigError(f"limit of {MOST_RELEASES} versions: run `edge-server packages remove VERSION` first")
    _copy_file(site, path, packages_folder(site.path) / build.file, build.sha256)
    if same:
        return index
    try:
        manifest = _manifest_of(site, index, before, build, facts)
    except ValueError as error:
        raise ConfigError(f"{path.name}: {error}") from error
    signed = sign(manifest, *read_signer(site))
    unchanged = [
        release for release, old in zip(index.releases, index.manifests(), strict=True) if old.version != facts.version
    ]
    ordered = sorted([*unchanged, signed], key=lambda release: decode_manifest(release.manifest).serial)
    serial = max(index.next_serial, manifest.serial + 1)
    return msgspec.structs.replace(index, releases=tuple(ordered), next_serial=serial)


def _manifest_of(
    site: SiteFolder, index: PackageIndex, before: PackageManifest | None, build: Build, facts: DebFacts
) -> PackageManifest:
    if before and before.formats != facts.formats:
        raise ConfigError(f"{build.file}: other packages of version {facts.version} differ in state formats; rebuild")
    builds = (*(before.builds if before else ()), build)
    if len(builds) > MOST_BUILDS:
        raise ConfigError(f"version {facts.version} has {MOST_BUILDS} packages already, which is the limit")
    return PackageManifest(
        name=AGENT,
        version=facts.version,
        serial=before.serial if before else index.next_serial,
        site=read_state(site.path).site,
        created=utc_stamp(),
        builds=builds,
        formats=facts.formats,
        format=2 if any(len(build.pythons) > 1 for build in builds) else 1,
    )


def _build_of(path: Path, facts: DebFacts) -> Build:
    try:
        digest = file_sha256(path)
        python = "-".join(dict.fromkeys((facts.python.split()[0], facts.python.split()[-1])))
        name = f"{AGENT}_{facts.version}_py{python}_{facts.arch}.deb"
        return Build(file=name, arch=facts.arch, python=facts.python, sha256=digest, size=path.stat().st_size)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def read_signer(site: SiteFolder) -> tuple[bytes, bytes]:
    """Return key and certificates of the package signer; raises ConfigError if they are missing or unreadable."""
    try:
        return site.gateway("packages.key").read_bytes(), site.gateway("packages.crt").read_bytes()
    except OSError as error:
        remedy = "`edge-server site init` creates the signing key; run this as root or the site's user"
        raise ConfigError(f"{error.filename}: {error.strerror}; {remedy}") from error


def _copy_file(site: SiteFolder, source: Path, target: Path, digest: str) -> None:
    """Copy a file atomically, unless the target has this content already."""
    if target.is_file() and file_sha256(target) == digest:
        return
    partial = target.with_name(f".{target.name}.part")
    try:
        with explain_disk_errors(target):
            partial.unlink(missing_ok=True)
            shutil.copyfile(source, partial)
            partial.chmod(PUBLIC)
            if owner := owner_ids(site.server_user):
                os.chown(partial, owner.uid, owner.gid)
            sync(partial)
            if file_sha256(partial) != digest:
                raise ConfigError(f"{source}: changed while it was read; add it again")
            partial.replace(target)
            sync(target.parent)
    finally:
        partial.unlink(missing_ok=True)


def remove_packages(site: SiteFolder, version: str) -> PackageManifest:
    """Remove a version and its files; boards that run it keep it.

    Raises:
        ConfigError: There is no such version.
        Unwritable: The disk is full or read-only.
    """
    with edit_index(site) as index:
        manifests = index.manifests()
        removed = find_version(manifests, version)
        remaining = [
            release for release, manifest in zip(index.releases, manifests, strict=True) if manifest.version != version
        ]
        write_index(site, msgspec.structs.replace(index, releases=tuple(remaining)))
        for build in removed.builds:
            (packages_folder(site.path) / build.file).unlink(missing_ok=True)
    return removed


def find_version(manifests: Sequence[PackageManifest], version: str) -> PackageManifest:
    """Return the manifest of a version.

    Raises:
        ConfigError: There is none.
    """
    for manifest in manifests:
        if manifest.version == version:
            return manifest
    versions = ", ".join(manifest.version for manifest in manifests) or "none"
    problem = f"agent {version[:64]!r} is not among this gateway's packages: {versions}"
    raise ConfigError(f"{problem}; add it by `edge-server packages add FILE.deb`")


def add_wheels(site: SiteFolder, folder: Path) -> list[WheelFile]:
    """Add all wheels of a folder; return the new ones.

    Args:
        folder: Folder with `.whl` files, as `device-agent setup train --list` names them.

    Raises:
        ConfigError: There are none, or one of the same name has another content.
        Unwritable: The disk is full or read-only.
    """
    paths = sorted(folder.glob("*.whl")) if folder.is_dir() else []
    if not paths:
        raise ConfigError(f"{folder}: contains no wheels; list those needed by `device-agent setup train --list`")
    with edit_index(site) as index:
        place = packages_folder(site.path) / WHEELS
        make_folder(site, place)
        wheels, new = {wheel.file: wheel for wheel in index.wheels}, []
        for path in paths:
            wheel = WheelFile(file=path.name, sha256=file_sha256(path), size=path.stat().st_size)
            before = wheels.get(path.name)
            if before and before.sha256 != wheel.sha256:
                raise ConfigError(f"{path}: the store has other content under that name; one of them is damaged")
            _copy_file(site, path, place / path.name, wheel.sha256)
            if not before:
                wheels[path.name] = wheel
                new.append(wheel)
        if len(wheels) > MOST_WHEELS:
            raise ConfigError(f"{len(wheels)} wheels exceed the limit of {MOST_WHEELS}")
        write_index(site, msgspec.structs.replace(index, wheels=tuple(wheels[name] for name in sorted(wheels))))
    return new


def find_package_faults(site: Path) -> Iterator[tuple[str, str]]:
    """Yield each faulty file of a site's packages, and its fault.

    Raises:
        ConfigError: The index cannot be read.
    """
    index, folder = read_index(site), packages_folder(site)
    roots = split_certificates((site / "ca" / "root.crt").read_bytes())  # two during a root rotation
    for signed in index.releases:
        try:
            [manifest, *_] = [verify(signed, root) for root in roots]  # boards trust either root
        except FieldFleetError as error:
            yield f"{PACKAGES}/{decode_manifest(signed.manifest).version}", str(error)
            continue
        for build in manifest.builds:
            path = folder / build.file
            if not path.is_file() or path.stat().st_size != build.size or file_sha256(path) != build.sha256:
                yield f"{PACKAGES}/{build.file}", "is missing, or differs from what was signed"
    yield from _find_project_faults(index, folder, roots)
    for wheel in index.wheels:
        path = folder / WHEELS / wheel.file
        if not path.is_file() or path.stat().st_size != wheel.size:
            yield f"{PACKAGES}/{WHEELS}/{wheel.file}", "is missing or incomplete"


def _find_project_faults(index: PackageIndex, folder: Path, roots: Sequence[bytes]) -> Iterator[tuple[str, str]]:
    for signed in index.projects:
        manifest = decode_project(signed.manifest)
        path = folder / PROJECTS / manifest.name / manifest.file
        place = f"{PACKAGES}/{PROJECTS}/{manifest.name}/{manifest.file}"
        try:
            for root in roots:
                verify_project(signed, root)
        except FieldFleetError as error:
            yield place, str(error)
        if not path.is_file() or path.stat().st_size != manifest.size or file_sha256(path) != manifest.sha256:
            yield place, "is missing, or differs from what was signed"
