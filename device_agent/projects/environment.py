"""Pass the agent's plugins and project to child processes, through environment variables."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from device_agent.projects.provide import FOLDER, USED, VARIABLE
from shared import registry

INSTALLED = "FIELDFLEET_INSTALLED"
"""Environment variable of child processes: folders of the listed projects, which hold their versions."""


def export_plugins(entries: Sequence[str], projects: Sequence[str], state_dir: Path) -> None:
    """Pass an operator's lists to the child processes of this one."""
    if entries:
        os.environ[registry.VARIABLE] = " ".join(dict.fromkeys([*registry.entries_of_environment(), *entries]))
    if projects:
        os.environ[INSTALLED] = os.pathsep.join(str((state_dir / FOLDER / name).absolute()) for name in projects)


def adopt_plugins() -> None:
    """Allow what the parent process lists, with the version of each project that a task used last."""
    registry.allow(registry.entries_of_environment())
    if os.environ.get(VARIABLE):
        from shared.projects.working_folder import activate_found  # noqa: PLC0415 - for its author's machine

        activate_found()
    for home in map(Path, filter(None, os.environ.get(INSTALLED, "").split(os.pathsep))):
        if (folder := home / USED).is_dir():
            registry.allow_package(home.name)
            sys.path.append(str(folder.resolve()))
