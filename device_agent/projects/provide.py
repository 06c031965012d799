"""Find the project version of a task or release; install it if missing.

The installer is a process of its own, so that the idle agent loads neither TLS for downloads, nor certificates, nor
archives. It writes a version completely or not at all, and may be killed at any time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from device_agent.identity.credentials import CURRENT as CURRENT_SET
from device_agent.identity.credentials import FOLDER as IDENTITY
from device_agent.identity.credentials import read_membership
from shared.errors import ConfigError, TaskFailed
from shared.projects.names import require_project_name, require_version
from shared.protocol.messages import ProjectVersion
from shared.runtime.processes import terminate

log = logging.getLogger(__name__)

FOLDER = "projects"
USED = "current"
"""Link to the version that a task used last."""
VARIABLE = "FIELDFLEET_PROJECTS"
"""As in `shared.projects.working_folder`, which needs a parser of TOML."""
NO_CERTIFICATES = (
    "this board has not joined a site by a token, so that no signature can be verified: run `device-agent join`, or "
    "install the code by hand and list it under [trainer] plugins"
)
EXIT_REFUSED = 2
"""The installer's exit code where another attempt cannot help."""
MOST_MESSAGE = 400


@dataclass(frozen=True)
class ProvidedProject:
    """A project's code on this machine; `folder` belongs on the path of the trainer."""

    name: str
    folder: Path


@dataclass(frozen=True)
class Projects:
    """Projects that this board's operator lists.

    Attributes:
        state_dir: The agent's folder; versions are installed below it.
        listed: Names of the projects.
        source: The board's own data source, such as `air.data:read`.
        served: Returns the versions by project that served releases name.
        retained: Returns versions that must stay installed, since the board may return to their releases.
    """

    state_dir: Path
    listed: Sequence[str] = ()
    source: str = ""
    served: Callable[[], Mapping[str, str]] = dict
    retained: Callable[[], Iterable[ProjectVersion]] = tuple
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, compare=False)

    async def provide_for_task(self, project: ProjectVersion | None) -> tuple[ProvidedProject, ...]:
        """Return the projects of a task: the one that it names, and that of the board's own data source.

        Raises:
            TaskFailed: As of `provide`.
        """
        named = (await self.provide(project),) if project else ()
        for provided in named:
            if provided.folder.parent == self.state_dir / FOLDER / provided.name:  # not a working folder
                _mark_used(provided.folder)
        own = self.source.partition(":")[0].partition(".")[0]
        if own not in self.listed or (project and project.name == own):
            return named
        folder = find_used_version(self.state_dir, own, self.served())
        return (*named, ProvidedProject(own, folder.resolve())) if folder else named

    async def provide(self, project: ProjectVersion) -> ProvidedProject:
        """Return the folder of a project, installed now if necessary.

        Raises:
            TaskFailed: It is not listed, refused, or the gateway does not answer.
        """
        try:
            require_project_name(project.name)
            require_version(project.version)
            self._require_listed(project)
            if place := _find_working_folder(project):
                return place
            folder = self.state_dir / FOLDER / project.name / project.version
            if not folder.is_dir():  # renamed once it is complete
                self._require_membership(project)
                async with self._turn:
                    await self._install(project)
        except (ConfigError, ValueError) as error:
            raise TaskFailed(f"ConfigError: {error}") from error
        return ProvidedProject(project.name, folder)

    def _require_listed(self, project: ProjectVersion) -> None:
        if project.name not in self.listed:
            raise ConfigError(
                f"project {project.name!r} is not listed on this board; add it to [trainer] projects if you trust it"
            )

    def _require_membership(self, project: ProjectVersion) -> None:
        if read_membership(self.state_dir / IDENTITY / CURRENT_SET) is None:
            raise ConfigError(f"project {project.name!r} is not installed: {NO_CERTIFICATES}")

    async def _install(self, project: ProjectVersion) -> None:
        log.info("project %s %s: installing", project.name, project.version)
        retained = sorted(other.version for other in self.retained() if other.name == project.name)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "device_agent.projects.install"),
            *(str(self.state_dir), project.name, project.version, *retained),
            stderr=PIPE,
        )
        try:
            _, output = await process.communicate()
        except asyncio.CancelledError:
            await terminate(process)
            raise
        if process.returncode:
            cause = (output.decode(errors="replace").strip().splitlines() or ["the installer ended"])[-1][:MOST_MESSAGE]
            problem = f"project {project.name} {project.version} is not installed: {cause}"
            if process.returncode == EXIT_REFUSED:
                raise ConfigError(problem)
            raise TaskFailed(problem)
        log.info("project %s %s: installed", project.name, project.version)


def find_used_version(state_dir: Path, name: str, served: Mapping[str, str]) -> Path | None:
    """Return the folder of a project for processes without a task; None if no version is installed.

    Args:
        served: Versions by project that served releases name; a release that is rolled back takes its project along.
    """
    home = state_dir / FOLDER / name
    folders = [home / version for version in (served.get(name), USED) if version]
    return next((folder for folder in folders if folder.is_dir()), None)


def _mark_used(folder: Path) -> None:
    """Link to a version for other processes that need the project's code."""
    link, part = folder.parent / USED, folder.parent / f".{USED}.part"
    if link.is_symlink() and link.readlink().name == folder.name:
        return
    part.unlink(missing_ok=True)
    part.symlink_to(folder.name)
    part.replace(link)


def _find_working_folder(project: ProjectVersion) -> ProvidedProject | None:
    """Return the project's working folder, if the environment of this process names it.

    Raises:
        ConfigError: It is of another version.
    """
    if not (folders := os.environ.get(VARIABLE, "")):
        return None
    from shared.projects.working_folder import find_working_folder  # noqa: PLC0415 - a parser, for its author's machine

    for folder in folders.split(os.pathsep):
        if (working := find_working_folder(Path(folder))) and working.name == project.name:
            if working.version != project.version:
                raise ConfigError(
                    f"project {project.name!r}: {folder} has version {working.version}, the task {project.version}"
                )
            return ProvidedProject(project.name, working.folder)
    return None
