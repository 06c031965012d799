"""Working folders of projects: code that is used without installation, on its author's machine.

    air/pyproject.toml    [project] name and version, and [tool.fieldfleet] project = "air"
    air/plan.toml         a plan with `project = "air"`
    air/air/              the package

`activate` puts the folder on the path of this process, and of its children by `VARIABLE`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path

import msgspec

from shared import registry
from shared.config import parse, read_bytes
from shared.errors import ConfigError
from shared.projects.names import require_project_name, require_version
from shared.protocol.messages import ProjectVersion

FILE = "pyproject.toml"
MARKER = b"[tool.fieldfleet"
"""Text of every working folder's file; other files are not parsed."""
VARIABLE = "FIELDFLEET_PROJECTS"
"""Environment variable with the active working folders, separated as in PATH."""

_NAME = re.compile(r"\w[\w.-]*")
_active: dict[str, WorkingFolder] = {}


class _Marker(msgspec.Struct, frozen=True):
    project: str = ""


class _Tools(msgspec.Struct, frozen=True):
    fieldfleet: _Marker = _Marker()


class _Distribution(msgspec.Struct, frozen=True):
    name: str = ""
    version: str = ""
    dependencies: list[str] = []
    entry_points: dict[str, dict[str, str]] = msgspec.field(name="entry-points", default={})


class _PyProject(msgspec.Struct, frozen=True):
    project: _Distribution = _Distribution()
    tool: _Tools = _Tools()


@dataclass(frozen=True)
class WorkingFolder:
    """A project's folder.

    Attributes:
        requires: Distributions that the code imports.
        entry_points: Plugins that a plan may call by a short name: `module:attribute` by group and name.
    """

    folder: Path
    name: str
    version: str
    requires: tuple[str, ...] = ()
    entry_points: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def package(self) -> Path:
        """Folder of the package."""
        return self.folder / self.name

    def identity(self) -> ProjectVersion:
        """Return its name and version."""
        return ProjectVersion(name=self.name, version=self.version)


def find_working_folder(folder: Path) -> WorkingFolder | None:
    """Return the project of a folder; None if it is not a working folder.

    Raises:
        ConfigError: Its file is damaged, or a name or version is malformed.
    """
    path = folder / FILE
    if not path.is_file() or MARKER not in (data := read_bytes(path)):
        return None
    content = parse(data, _PyProject, path)
    if not (name := content.tool.fieldfleet.project):
        return None
    try:
        require_project_name(name)
        require_version(content.project.version)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not (folder / name / "__init__.py").is_file():
        raise ConfigError(f"{path}: project {name!r} needs the package {folder / name}/__init__.py; create it")
    project = content.project
    entry_points = {group: names for group, names in project.entry_points.items() if group.startswith(registry.PREFIX)}
    _require_entry_points(entry_points, name, path)
    return WorkingFolder(folder.resolve(), name, project.version, tuple(project.dependencies), entry_points)


def _require_entry_points(entry_points: Mapping[str, Mapping[str, str]], package: str, path: Path) -> None:
    """Refuse entry points that boards do not have or may not import.

    Raises:
        ConfigError: A name is malformed, or refers to another package.
    """
    value = re.compile(rf"{package}(\.\w+)*:\w+(\.\w+)*")
    for group, names in entry_points.items():
        for name, reference in names.items():
            if not _NAME.fullmatch(name) or not value.fullmatch(reference):
                raise ConfigError(
                    f'{path}: entry point {name[:64]!r} of {group}: {reference[:120]!r}; write `name = "{package}.'
                    "module:attribute\"`, of the project's own package"
                )


def activate(project: WorkingFolder) -> None:
    """Make a project's code importable here and in child processes, and allow all of its plugins.

    Raises:
        ConfigError: Python finds another package of that name.
    """
    folder, before = str(project.folder), _active.get(project.name)
    if before and before.version != project.version and project.name in sys.modules:
        raise ConfigError(
            f"project {project.name!r}: this process has loaded version {before.version}, and {folder} now has "
            f"{project.version}; start another process"
        )
    replaced = str(before.folder) if before else folder
    sys.path[:] = [entry for entry in sys.path if entry not in (replaced, folder)]
    sys.path.append(folder)  # last, so that its files hide no module of this machine
    _require_own_package(project)
    _active[project.name] = project
    registry.allow_package(project.name, project.version, project.entry_points)
    others = [path for path in os.environ.get(VARIABLE, "").split(os.pathsep) if path not in ("", replaced, folder)]
    os.environ[VARIABLE] = os.pathsep.join([*others, folder])


def _require_own_package(project: WorkingFolder) -> None:
    """Refuse a project whose name leads to other code in this process.

    Raises:
        ConfigError: It does.
    """
    imported = sys.modules.get(project.name)
    spec = imported.__spec__ if imported else PathFinder.find_spec(project.name)
    if spec is None or not spec.origin or not Path(spec.origin).is_relative_to(project.folder):
        place = spec.origin if spec else "nowhere"
        raise ConfigError(
            f"project {project.name!r} of {project.folder}: Python imports {place} instead; start another process, or "
            "give the project another name"
        )


def activate_found(*folders: Path) -> None:
    """Activate the working folders that the environment names, and those among `folders`.

    Raises:
        ConfigError: As `find_working_folder`.
    """
    named = (Path(folder) for folder in os.environ.get(VARIABLE, "").split(os.pathsep) if folder)
    for folder in (*named, *folders):
        if project := find_working_folder(folder):
            activate(project)


def find_active(name: str) -> WorkingFolder | None:
    """Return the active working folder of a project."""
    return _active.get(name)


def active_names() -> list[str]:
    """Return the names of the active projects."""
    return sorted(_active)
