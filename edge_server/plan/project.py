"""The project of a plan: its working folder, or an installed distribution."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from edge_server.plan.plan import Plan
from shared.errors import ConfigError
from shared.projects.working_folder import activate, activate_found, find_active, find_working_folder
from shared.protocol.messages import ProjectVersion


def open_project(plan: Plan, path: Path) -> None:
    """Make the code of a plan's project importable, where the plan lies in the project's working folder.

    Raises:
        ConfigError: There is no such project beside the plan, active or installed; or its file is damaged.
    """
    if not plan.project:
        return
    beside = find_working_folder(path.parent)
    if beside and beside.name == plan.project:
        activate(beside)
    elif not find_active(plan.project) and not _installed_version(plan.project):
        raise ConfigError(
            f"{path}: project {plan.project!r} is neither beside the plan ({path.parent}/pyproject.toml) nor "
            "installed; put the plan into the project's folder, or set FIELDFLEET_PROJECTS to it"
        )


def project_data_root(plan: Plan, path: Path, data_root: Path) -> Path:
    """Return the folder at which relative paths of a plan's data start: the project's, if the plan lies in it."""
    if not plan.project:
        return data_root
    active = find_active(plan.project)
    return active.folder if active and active.folder == path.parent.resolve() else data_root


def plan_project(plan: Plan) -> ProjectVersion | None:
    """Return name and version of a plan's project; None without one.

    Raises:
        ConfigError: It is neither active nor installed.
    """
    if not plan.project:
        return None
    if active := find_active(plan.project):
        return active.identity()
    if version := _installed_version(plan.project):
        return ProjectVersion(name=plan.project, version=version)
    raise ConfigError(f"project {plan.project!r} is not installed; set FIELDFLEET_PROJECTS to its folder")


def require_project(plan: Plan, run: str) -> None:
    """Activate the project of a run's network, if it is in the current folder or FIELDFLEET_PROJECTS.

    Raises:
        ConfigError: It is neither there, nor active, nor installed.
    """
    if not plan.project or find_active(plan.project) or _installed_version(plan.project):
        return
    activate_found(Path.cwd())  # `edge-server` did so when it started; a script of the API did not
    if not find_active(plan.project):
        raise ConfigError(
            f"run {run}: model {plan.model.name!r} needs the code of project {plan.project!r}; run this command in the "
            "project's folder, or set FIELDFLEET_PROJECTS to that folder"
        )


@lru_cache(maxsize=16)
def _installed_version(name: str) -> str:
    from importlib import metadata  # noqa: PLC0415 - two megabytes, which only projects need

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
