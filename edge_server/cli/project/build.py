"""Build the wheel and manifest of a project, byte for byte reproducible."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shared.errors import ConfigError, CorruptFile
from shared.plugins import folder_digest
from shared.projects.manifest import MOST_WHEEL, ProjectManifest
from shared.projects.wheel import MOST_UNPACKED, read_wheel, write_wheel
from shared.projects.working_folder import FILE, WorkingFolder, find_working_folder
from shared.runtime.durable import replace_file

OUTPUT = "dist"
SKIPPED = "__pycache__"


@dataclass(frozen=True)
class BuiltProject:
    """A wheel with its unsigned manifest."""

    manifest: ProjectManifest
    wheel: bytes


def build_project(folder: Path) -> BuiltProject:
    """Build a project in memory.

    Raises:
        ConfigError: The folder is not a working folder, or has a file that does not belong into a project.
    """
    project = find_working_folder(folder)
    if project is None:
        raise ConfigError(
            f'{folder / FILE} is missing or has no [tool.fieldfleet] project = "NAME"; `edge-server new` writes one'
        )
    wheel = write_wheel(project.name, project.version, _collect(project), project.entry_points)
    try:
        read_wheel(wheel, project.name, project.version)
    except CorruptFile as error:
        raise ConfigError(f"{folder}: {error}") from error
    if len(wheel) > MOST_WHEEL:
        raise ConfigError(f"{folder}: the wheel has {len(wheel)} bytes, more than {MOST_WHEEL}; leave data out of it")
    manifest = ProjectManifest(
        name=project.name,
        version=project.version,
        sha256=hashlib.sha256(wheel).hexdigest(),
        size=len(wheel),
        digest=folder_digest(project.package),
        requires=project.requires,
    )
    return BuiltProject(manifest, wheel)


def write_build(built: BuiltProject, folder: Path) -> Path:
    """Write wheel and manifest into the folder `dist`; return the path of the wheel.

    Raises:
        Unwritable: The disk is full or read-only.
    """
    output = folder / OUTPUT
    output.mkdir(exist_ok=True)
    path = output / built.manifest.file
    replace_file(path, built.wheel)
    replace_file(path.with_suffix(".json"), msgspec.json.format(msgspec.json.encode(built.manifest), indent=1) + b"\n")
    return path


def _collect(project: WorkingFolder) -> Mapping[str, bytes]:
    """Read the files of the package, by path in the wheel."""
    files, size = dict[str, bytes](), 0
    for path in sorted(project.package.rglob("*")):
        relative = path.relative_to(project.folder)
        if path.is_symlink():
            raise ConfigError(f"{path} is a link; put the file itself there")
        if not path.is_file() or SKIPPED in relative.parts or any(part.startswith(".") for part in relative.parts):
            continue
        size += path.stat().st_size
        if size > MOST_UNPACKED:
            raise ConfigError(f"{project.package}: more than {MOST_UNPACKED >> 20} MiB; keep data outside the package")
        files[relative.as_posix()] = path.read_bytes()
    return files
