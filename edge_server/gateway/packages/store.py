"""Packages of the agent that a gateway offers to its boards: the files, and a signed manifest for each version.

    packages/index.json              what there is: signed manifests, and wheels with their SHA-256
    packages/FILE.deb                packages, under the names that the manifests have
    packages/wheels/FILE.whl         what the boards' `device-agent setup` takes

A file comes under its name whole or not at all, and never changes; what is not in the index is not there for anybody.
"""

from __future__ import annotations

import hashlib
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
from shared.protocol.packages import (
    AGENT,
    MOST_BUILDS,
    Build,
    PackageManifest,
    SignedManifest,
    read_manifest,
    sign,
    verify,
)
from shared.runtime.clock import utc_stamp
from shared.runtime.durable import explain_disk_errors, replace_file, sync

PACKAGES, INDEX, WHEELS, LOCK = "packages", "index.json", "wheels", ".packages.lock"
FORMAT = 1
MOST_INDEX, MOST_RELEASES, MOST_WHEELS = 16 << 20, 64, 1024
MOST_READ_AT_ONCE = 2
"""Packages; each takes the 64 MiB of its compression's dictionary."""


class WheelFile(msgspec.Struct, frozen=True, kw_only=True):
    """A wheel: the name of its file, its SHA-256 (hexadecimal), its bytes."""

    file: str
    sha256: str
    size: int


class PackageIndex(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway has.

    Attributes:
        next_serial: Number of the next version; none is ever given twice.
        releases: Signed manifests, the oldest first.
        wheels: In the order of their names.
    """

    format: int = FORMAT
    next_serial: int = 1
    releases: tuple[SignedManifest, ...] = ()
    wheels: tuple[WheelFile, ...] = ()

    def manifests(self) -> list[PackageManifest]:
        """Return what the manifests say; who signed them is not looked at.

        Raises:
            ConfigError: One is of a newer form.
            WireError: One is none.
        """
        return [read_manifest(one.manifest) for one in self.releases]


def packages_folder(site: Path) -> Path:
    """Return where a site's packages are."""
    return site / PACKAGES


def read_index(site: Path) -> PackageIndex:
    """Return what a gateway has; nothing where no package was ever added.

    Args:
        site: The folder of the site.

    Raises:
        ConfigError: The file is damaged, or of a newer version.
    """
    path = packages_folder(site) / INDEX
    try:
        with path.open("rb") as file:
            found = msgspec.json.decode(file.read(MOST_INDEX), type=PackageIndex)
        if found.format > FORMAT:
            raise ConfigError(f"{path}: of format {found.format}, and this program knows {FORMAT}: update it")
        found.manifests()
    except FileNotFoundError:
        return PackageIndex()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; run this as root or the site's user") from error
    except (msgspec.MsgspecError, ValueError, RecursionError, FieldFleetError) as error:
        if isinstance(error, ConfigError):
            raise
        remedy = "move the folder away and add the packages again"
        raise ConfigError(f"{path}: no index of packages ({error}); {remedy}") from error
    return found


@contextmanager
def editing(site: SiteFolder) -> Iterator[PackageIndex]:
    """Hold a site's packages while the block lasts."""
    read_state(site.path)
    with lock_site(site.path, LOCK):
        try:
            _make_folder(site, packages_folder(site.path))
        except OSError as error:
            raise ConfigError(f"{error.filename}: {error.strerror}; run this as root or the site's user") from error
        yield read_index(site.path)


def _make_folder(site: SiteFolder, folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir()
        folder.chmod(FOLDER_MODE)
        if owner := owner_ids(site.server_user):
            os.chown(folder, *owner)


def write_index(site: SiteFolder, index: PackageIndex) -> None:
    """Write what a gateway has; the caller holds it.

    Args:
        site: The folder of the site.
        index: What there is from now on.
    """
    data = msgspec.json.format(msgspec.json.encode(index), indent=1) + b"\n"
    path = packages_folder(site.path) / INDEX
    replace_file(path, data, mode=PUBLIC, owner=owner_ids(site.server_user))


def read_debs(paths: Sequence[Path]) -> list[tuple[Path, DebFacts]]:
    """Return what packages say of themselves, with their paths; the time goes into unpacking, which threads share.

    Raises:
        ConfigError: One is no package of the agent, or cannot be read.
    """
    with ThreadPoolExecutor(MOST_READ_AT_ONCE) as pool:
        return list(zip(paths, pool.map(read_deb, paths), strict=True))


def add_packages(site: SiteFolder, paths: Sequence[Path]) -> list[PackageManifest]:
    """Take packages in and sign what they are; return the manifests of their versions.

    Args:
        site: The folder of the site.
        paths: Files of packages; those of one version may come one after the other.

    Raises:
        ConfigError: One is no package of the agent, or as `add_read_packages`.
        Unwritable: The disk takes nothing more.
    """
    return add_read_packages(site, read_debs(paths))


def add_read_packages(site: SiteFolder, found: Sequence[tuple[Path, DebFacts]]) -> list[PackageManifest]:
    """Take packages in that were read, and sign what they are; return the manifests of their versions.

    Args:
        site: The folder of the site.
        found: Their files, and what they say of themselves.

    Raises:
        ConfigError: Another one of its kind and version is there, or nothing can be signed.
        Unwritable: The disk takes nothing more.
    """
    changed = set[str]()
    with editing(site) as index:
        after = index
        for path, facts in found:
            after = _with_package(site, after, path, facts)
            changed.add(facts.version)
        write_index(site, after)
    return [one for one in after.manifests() if one.version in changed]


def _with_package(site: SiteFolder, index: PackageIndex, path: Path, facts: DebFacts) -> PackageIndex:
    build = _build_of(path, facts)
    known = {one.version: one for one in index.manifests()}
    before = known.get(facts.version)
    others = before.builds if before else ()
    same = [one for one in others if (one.arch, one.python) == (build.arch, build.python)]
    if same and same[0].sha256 != build.sha256:
        told = f"{path.name}: {same[0].file} is there already, of the same version and another content"
        raise ConfigError(f"{told}; a version never changes: build the package under another one, or remove that first")
    if len(known) >= MOST_RELEASES and not before:
        raise ConfigError(f"{MOST_RELEASES} versions are there: `edge-server packages remove VERSION` makes room")
    _take_file(site, path, packages_folder(site.path) / build.file, build.sha256)
    if same:
        return index
    try:
        manifest = _manifest_of(site, index, before, build, facts)
    except ValueError as error:
        raise ConfigError(f"{path.name}: {error}") from error
    signed = sign(manifest, *_signer(site))
    kept = [one for one, old in zip(index.releases, index.manifests(), strict=True) if old.version != facts.version]
    ordered = sorted([*kept, signed], key=lambda one: read_manifest(one.manifest).serial)
    serial = max(index.next_serial, manifest.serial + 1)
    return msgspec.structs.replace(index, releases=tuple(ordered), next_serial=serial)


def _manifest_of(
    site: SiteFolder, index: PackageIndex, before: PackageManifest | None, build: Build, facts: DebFacts
) -> PackageManifest:
    if before and before.formats != facts.formats:
        raise ConfigError(f"{build.file}: other packages of version {facts.version} keep their state in another form")
    builds = (*(before.builds if before else ()), build)
    if len(builds) > MOST_BUILDS:
        raise ConfigError(f"version {facts.version} has {MOST_BUILDS} packages already")
    return PackageManifest(
        name=AGENT,
        version=facts.version,
        serial=before.serial if before else index.next_serial,
        site=read_state(site.path).site,
        created=utc_stamp(),
        builds=builds,
        formats=facts.formats,
        format=2 if any(len(one.pythons) > 1 for one in builds) else 1,
    )


def _build_of(path: Path, facts: DebFacts) -> Build:
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        python = "-".join(dict.fromkeys((facts.python.split()[0], facts.python.split()[-1])))
        name = f"{AGENT}_{facts.version}_py{python}_{facts.arch}.deb"
        return Build(file=name, arch=facts.arch, python=facts.python, sha256=digest, size=path.stat().st_size)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def _signer(site: SiteFolder) -> tuple[bytes, bytes]:
    try:
        return site.gateway("packages.key").read_bytes(), site.gateway("packages.crt").read_bytes()
    except OSError as error:
        remedy = "`edge-server site init` makes what signs packages; run this as root or the site's user"
        raise ConfigError(f"{error.filename}: {error.strerror}; {remedy}") from error


def _take_file(site: SiteFolder, source: Path, target: Path, digest: str) -> None:
    """Copy a file to its place, whole or not at all, if that has not this content already."""
    if target.is_file() and digest_of(target) == digest:
        return
    partial = target.with_name(f".{target.name}.part")
    try:
        with explain_disk_errors(target):
            partial.unlink(missing_ok=True)
            shutil.copyfile(source, partial)
            partial.chmod(PUBLIC)
            if owner := owner_ids(site.server_user):
                os.chown(partial, *owner)
            sync(partial)
            if digest_of(partial) != digest:
                raise ConfigError(f"{source}: changed while it was read; add it again")
            partial.replace(target)
            sync(target.parent)
    finally:
        partial.unlink(missing_ok=True)


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_packages(site: SiteFolder, version: str) -> PackageManifest:
    """Forget a version and its files; boards that run it keep it.

    Args:
        site: The folder of the site.

    Raises:
        ConfigError: There is none.
        Unwritable: The disk takes nothing more.
    """
    with editing(site) as index:
        manifests = index.manifests()
        gone = find_version(manifests, version)
        kept = [one for one, known in zip(index.releases, manifests, strict=True) if known.version != version]
        write_index(site, msgspec.structs.replace(index, releases=tuple(kept)))
        for one in gone.builds:
            (packages_folder(site.path) / one.file).unlink(missing_ok=True)
    return gone


def find_version(manifests: Sequence[PackageManifest], version: str) -> PackageManifest:
    """Return the manifest of a version.

    Raises:
        ConfigError: There is none.
    """
    for one in manifests:
        if one.version == version:
            return one
    known = ", ".join(one.version for one in manifests) or "none"
    told = f"no agent {version[:64]!r} is among this gateway's packages; there are: {known}"
    raise ConfigError(f"{told}; `edge-server packages add FILE.deb` signs one and takes it in")


def add_wheels(site: SiteFolder, folder: Path) -> list[WheelFile]:
    """Take all wheels of a folder in, for boards to set themselves up with; return those that are new.

    Args:
        site: The folder of the site.
        folder: With files `.whl`, as `device-agent setup train --list` names them.

    Raises:
        ConfigError: There are none, or one of the same name has another content.
        Unwritable: The disk takes nothing more.
    """
    paths = sorted(folder.glob("*.whl")) if folder.is_dir() else []
    if not paths:
        raise ConfigError(f"{folder}: holds no wheels; `device-agent setup train --list` says which a board wants")
    with editing(site) as index:
        place = packages_folder(site.path) / WHEELS
        _make_folder(site, place)
        known, new = {one.file: one for one in index.wheels}, []
        for path in paths:
            found = WheelFile(file=path.name, sha256=digest_of(path), size=path.stat().st_size)
            before = known.get(path.name)
            if before and before.sha256 != found.sha256:
                raise ConfigError(f"{path}: a file of that name and another content is there; one of both is damaged")
            _take_file(site, path, place / path.name, found.sha256)
            if not before:
                known[path.name] = found
                new.append(found)
        if len(known) > MOST_WHEELS:
            raise ConfigError(f"{len(known)} wheels, more than {MOST_WHEELS}")
        write_index(site, msgspec.structs.replace(index, wheels=tuple(known[name] for name in sorted(known))))
    return new


def package_faults(site: Path) -> Iterator[tuple[str, str]]:
    """Yield what is not right with a site's packages: the file, and what is wrong.

    Args:
        site: The folder of the site.

    Raises:
        ConfigError: The index cannot be read.
    """
    index, folder = read_index(site), packages_folder(site)
    roots = split_certificates((site / "ca" / "root.crt").read_bytes())  # two while it is replaced
    for signed in index.releases:
        try:
            [manifest, *_] = [verify(signed, root) for root in roots]  # some boards trust the one, some the other
        except FieldFleetError as error:
            yield f"{PACKAGES}/{read_manifest(signed.manifest).version}", str(error)
            continue
        for build in manifest.builds:
            path = folder / build.file
            if not path.is_file() or path.stat().st_size != build.size or digest_of(path) != build.sha256:
                yield f"{PACKAGES}/{build.file}", "is gone, or not what was signed"
    for wheel in index.wheels:
        path = folder / WHEELS / wheel.file
        if not path.is_file() or path.stat().st_size != wheel.size:
            yield f"{PACKAGES}/{WHEELS}/{wheel.file}", "is gone, or not whole"
