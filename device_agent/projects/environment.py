"""Pass the agent's plugins and project to child processes, through environment variables."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from device_agent.projects.provide import FOLDER, USED, VARIABLE, find_used_version
from shared import registry

log = logging.getLogger(__name__)

INSTALLED = "FIELDFLEET_INSTALLED"
"""Environment variable of child processes: a folder for each listed project, of the version to use."""


def export_plugins(
    entries: Sequence[str], projects: Sequence[str], state_dir: Path, served: Mapping[str, str] | None = None
) -> None:
    """Pass an operator's lists to the child processes of this one.

    Args:
        served: Versions by project that served releases name; others have the version that a task used last.
    """
    if entries:
        os.environ[registry.VARIABLE] = " ".join(dict.fromkeys([*registry.entries_of_environment(), *entries]))
    if projects:
        homes = {name: (state_dir / FOLDER / name).absolute() for name in projects}
        folders = (find_used_version(state_dir, name, served or {}) or home / USED for name, home in homes.items())
        os.environ[INSTALLED] = os.pathsep.join(map(str, folders))


def adopt_plugins(projects: Mapping[str, str] | None = None) -> None:
    """Allow what the parent process lists, with the code of its projects.

    Args:
        projects: Folders by project, of other versions than the environment names.
    """
    registry.allow(registry.entries_of_environment())
    if os.environ.get(VARIABLE):
        from shared.projects.working_folder import activate_found  # noqa: PLC0415 - for its author's machine

        activate_found()
    listed = map(Path, filter(None, os.environ.get(INSTALLED, "").split(os.pathsep)))
    folders = {folder.parent.name: folder for folder in listed}
    for name, folder in (folders | {name: Path(other) for name, other in (projects or {}).items()}).items():
        if folder.is_dir():
            add_project(name, folder.resolve())


def add_project(name: str, folder: Path) -> None:
    """Make a project's code importable, last, so that it hides no module of this board; allow all of its plugins.

    A package that the board itself has under the project's name is not allowed instead.
    """
    sys.path.append(str(folder))
    spec = PathFinder.find_spec(name)
    if spec and spec.origin and Path(spec.origin).is_relative_to(folder):
        registry.allow_package(name)
    else:
        reason = f"project {name} is not used, this board has another module {name}, {spec and spec.origin}; rename one"
        log.warning("%s", reason)
        registry.refuse_package(name, reason)
