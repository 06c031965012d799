"""Working folders: they hide no module of this machine, and each name leads to one folder."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

from shared import registry
from shared.errors import ConfigError
from shared.objectives.loss_table import LOSSES
from shared.projects.working_folder import activate, activate_found, find_working_folder
from tests.naming import names_all

NAME = "working_air"


@pytest.fixture(autouse=True)
def process(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    monkeypatch.setenv("FIELDFLEET_PROJECTS", "")


def write_folder(folder: Path, name: str = NAME, more: str = "") -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(f"FOLDER = {str(folder)!r}\n")
    text = f'[project]\nname = "{name}"\nversion = "0.1.0"\n{more}[tool.fieldfleet]\nproject = "{name}"\n'
    (folder / "pyproject.toml").write_text(text)
    return folder


def test_files_beside_the_package_hide_no_module(tmp_path):
    """A folder is active by being the current one, and may come from anywhere."""
    write_folder(tmp_path)
    for module in ("torch", "shared", "statistics"):
        (tmp_path / f"{module}.py").write_text("raise RuntimeError")
    activate_found(tmp_path)
    assert sys.path[-1] == str(tmp_path)
    assert str(tmp_path) == importlib.import_module(NAME).FOLDER
    assert importlib.util.find_spec("torch").origin != str(tmp_path / "torch.py")


def test_one_name_leads_to_one_folder(tmp_path):
    first, second = (write_folder(tmp_path / name) for name in ("first", "second"))
    activate_found(first)
    activate_found(second)
    assert str(second) == importlib.import_module(NAME).FOLDER
    with pytest.raises(ConfigError) as refused:  # its code is loaded
        activate_found(first)
    assert names_all(str(refused.value), str(first), str(second), "process")
    with pytest.raises(ConfigError) as refused:
        activate_found(write_folder(tmp_path / "third", "numpy"))
    assert names_all(str(refused.value), "'numpy'", "name")
    assert not registry.is_allowed(registry.Plugin("numpy", "load"), "numpy:load")


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('slow = "os:system"', "'os:system'"),
        ('slow = "working_airs.x:y"', "'working_airs.x:y'"),
        ('slow = "working_air.x"', "'working_air.x'"),
        ('"a b" = "working_air.x:y"', "'a b'"),
    ],
)
def test_entry_points_are_of_the_projects_own_package(tmp_path, line, named):
    more = f'[project.entry-points."fieldfleet.algorithms"]\n{line}\n[project.entry-points.other]\nx = "os:system"\n'
    write_folder(tmp_path, more=more)
    with pytest.raises(ConfigError) as refused:
        find_working_folder(tmp_path)
    assert names_all(str(refused.value), named, "fieldfleet.algorithms", "working_air.module:attribute")


def test_an_entry_point_is_found_by_its_short_name(tmp_path):
    more = '[project.entry-points."fieldfleet.codecs"]\nplainest = "working_air:build"\n'
    project = find_working_folder(write_folder(tmp_path, more=more))
    assert project
    activate(project)
    [(name, plugin)] = [item for item in registry.offered_plugins("codecs") if item[0] == "plainest"]
    assert plugin == registry.Plugin("working_air", "build", "working-air", "0.1.0")
    assert registry.is_allowed(plugin, name)


@pytest.mark.parametrize(
    ("code", "named"), [("", "did you mean 'working_air.losses:own'"), ("raise RuntimeError", "FIELDFLEET_PLUGINS")]
)
def test_a_module_named_without_its_package_is_suggested(tmp_path, code, named):
    """Looking for it imports the package, whose own faults are not those of the plan."""
    folder = write_folder(tmp_path)
    (folder / NAME / "losses.py").touch()
    activate(find_working_folder(folder))
    (folder / NAME / "__init__.py").write_text(code)
    importlib.invalidate_caches()
    sys.modules.pop(NAME, None)
    with pytest.raises(ConfigError, match=re.escape(named)):
        registry.find(LOSSES, "losses:own", "loss")
