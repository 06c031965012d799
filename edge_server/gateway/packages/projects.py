"""Projects in a gateway's package store: signed by the site, offered to its boards."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from edge_server.gateway.packages.store import (
    PROJECTS,
    edit_index,
    make_folder,
    packages_folder,
    read_signer,
    write_index,
)
from edge_server.gateway.site_folder import PUBLIC, SiteFolder, owner_ids
from edge_server.gateway.state import read_state
from shared.errors import ConfigError, CorruptFile
from shared.projects.manifest import ProjectManifest, sign_project
from shared.projects.wheel import read_wheel
from shared.runtime.clock import utc_stamp
from shared.runtime.durable import replace_file

MOST_PROJECTS = 256


def publish_project(site: SiteFolder, manifest: ProjectManifest, wheel: bytes) -> ProjectManifest:
    """Sign a project's version and offer it to the site's boards; return the signed manifest.

    Raises:
        ConfigError: Another wheel of this version is there, the wheel does not fit its manifest, or signing fails.
        Unwritable: The disk is full or read-only.
    """
    _check(manifest, wheel)
    with edit_index(site) as index:
        versions = {(other.name, other.version): other for other in index.project_manifests()}
        if before := versions.get((manifest.name, manifest.version)):
            if before.sha256 != manifest.sha256:
                raise ConfigError(
                    f"project {manifest.name} {manifest.version} is published with other content; raise `version` in "
                    "pyproject.toml, or run `edge-server project remove` first"
                )
            return before
        if len(versions) >= MOST_PROJECTS:
            raise ConfigError(f"{MOST_PROJECTS} versions of projects are the limit: run `edge-server project remove`")
        folder = packages_folder(site.path) / PROJECTS
        make_folder(site, folder)
        make_folder(site, folder / manifest.name)
        replace_file(folder / manifest.name / manifest.file, wheel, mode=PUBLIC, owner=owner_ids(site.server_user))
        signed = msgspec.structs.replace(manifest, site=read_state(site.path).site, created=utc_stamp())
        projects = (*index.projects, sign_project(signed, *read_signer(site)))
        write_index(site, msgspec.structs.replace(index, projects=projects))
    return signed


def _check(manifest: ProjectManifest, wheel: bytes) -> None:
    """Refuse a wheel that no board would install."""
    if len(wheel) != manifest.size or hashlib.sha256(wheel).hexdigest() != manifest.sha256:
        raise ConfigError(f"{manifest.file}: differs from its manifest; run `edge-server project build` again")
    try:
        read_wheel(wheel, manifest.name, manifest.version)
    except CorruptFile as error:
        raise ConfigError(str(error)) from error


def remove_project(site: SiteFolder, name: str, version: str) -> ProjectManifest:
    """Withdraw a version; boards that have it keep it.

    Raises:
        ConfigError: There is no such version.
        Unwritable: The disk is full or read-only.
    """
    with edit_index(site) as index:
        manifests = index.project_manifests()
        removed = [manifest for manifest in manifests if (manifest.name, manifest.version) == (name, version)]
        if not removed:
            offered = ", ".join(f"{manifest.name} {manifest.version}" for manifest in manifests) or "none"
            raise ConfigError(f"project {name[:64]} {version[:64]} is not published; published: {offered}")
        remaining = tuple(
            signed for signed, manifest in zip(index.projects, manifests, strict=True) if manifest not in removed
        )
        write_index(site, msgspec.structs.replace(index, projects=remaining))
        project_wheel(site.path, removed[0]).unlink(missing_ok=True)
    return removed[0]


def project_wheel(site: Path, manifest: ProjectManifest) -> Path:
    """Return the path of a published wheel."""
    return packages_folder(site) / PROJECTS / manifest.name / manifest.file
