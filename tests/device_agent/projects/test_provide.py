"""Projects of a task on a board: only those that its operator lists, and none without certificates."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from device_agent.projects.install import main
from device_agent.projects.provide import EXIT_REFUSED, Projects, ProvidedProject
from shared.errors import ConfigError, TaskFailed, is_cause
from shared.protocol.messages import ProjectVersion
from tests.naming import names_all


def provide(projects: Projects, name: str = "air", version: str = "0.1.0") -> ProvidedProject:
    return asyncio.run(projects.provide(ProjectVersion(name=name, version=version)))


def refusal(projects: Projects, **wanted: str) -> str:
    """Return why a task with a project fails, for good."""
    with pytest.raises(TaskFailed) as caught:
        provide(projects, **wanted)
    assert is_cause(str(caught.value), ConfigError)
    return str(caught.value)


def test_without_the_list_nothing_is_installed(tmp_path):
    assert names_all(refusal(Projects(tmp_path)), "'air'", "projects")
    assert names_all(refusal(Projects(tmp_path, ["fire"])), "'air'", "projects")
    assert not list(tmp_path.iterdir())


def test_a_task_without_a_project_has_that_of_the_boards_data_source(tmp_path):
    """In the version that a served release names, if it is installed, or else that of the last task."""
    home = tmp_path / "projects" / "air"
    for version in ("0.1.0", "0.2.0"):
        (home / version).mkdir(parents=True)
    served: dict[str, str] = {}
    projects = Projects(tmp_path, ["air", "fire"], "air.data:read", lambda: served)

    def provide_for_task(name: str = "") -> tuple[ProvidedProject, ...]:
        return asyncio.run(projects.provide_for_task(ProjectVersion(name=name, version="0.2.0") if name else None))

    assert provide_for_task() == ()  # no task has used any version
    assert provide_for_task("air") == (ProvidedProject("air", home / "0.2.0"),)
    assert provide_for_task() == (ProvidedProject("air", home / "0.2.0"),)
    served["air"] = "0.1.0"
    assert provide_for_task() == (ProvidedProject("air", home / "0.1.0"),)
    assert provide_for_task("air") == (ProvidedProject("air", home / "0.2.0"),)  # a task names its version
    served["air"] = "0.3.0"
    assert provide_for_task() == (ProvidedProject("air", home / "0.2.0"),)
    (tmp_path / "projects" / "fire" / "0.2.0").mkdir(parents=True)
    assert [project.name for project in provide_for_task("fire")] == ["fire", "air"]
    assert asyncio.run(Projects(tmp_path, [], "air.data:read").provide_for_task(None)) == ()  # not listed


def test_a_network_without_certificates_installs_nothing(tmp_path, capsys):
    assert names_all(refusal(Projects(tmp_path, ["air"])), "'air'", "device-agent join")
    assert main([str(tmp_path), "air", "0.1.0"]) == EXIT_REFUSED
    assert names_all(capsys.readouterr().err, "device-agent join")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "version"), [("../air", "0.1.0"), ("air", "../0.1"), ("json", "0.1.0"), ("air", "")])
def test_names_that_are_paths_or_modules_are_refused(tmp_path, name, version):
    refusal(Projects(tmp_path, [name]), name=name, version=version)
    assert not list(tmp_path.iterdir())


def test_an_installed_version_is_used_as_it_is(tmp_path):
    place = tmp_path / "projects" / "air" / "0.1.0"
    place.mkdir(parents=True)
    assert provide(Projects(tmp_path, ["air"])) == ProvidedProject("air", place)


def test_on_its_authors_machine_the_working_folder_is_used(tmp_path, monkeypatch):
    folder = working_folder(tmp_path)
    monkeypatch.setenv("FIELDFLEET_PROJECTS", f"{tmp_path / 'other'}:{folder}")
    projects = Projects(tmp_path / "state", ["air"])
    assert provide(projects) == ProvidedProject("air", folder)
    assert names_all(refusal(projects, version="0.2.0"), "'air'", "0.1.0", "0.2.0")
    assert names_all(refusal(Projects(tmp_path / "state")), "'air'", "projects")


def working_folder(parent: Path) -> Path:
    folder = parent / "work"
    (folder / "air").mkdir(parents=True)
    (folder / "air" / "__init__.py").touch()
    (folder / "pyproject.toml").write_text('[project]\nversion = "0.1.0"\n[tool.fieldfleet]\nproject = "air"\n')
    return folder
