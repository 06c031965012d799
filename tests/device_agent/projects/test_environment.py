"""Child processes that read examples have the plugins that the board's operator lists, and the project used last."""

from __future__ import annotations

import sys

import pytest

from device_agent.commands.diagnosis.data_check import check_examples
from device_agent.projects.environment import INSTALLED, add_project, export_plugins
from shared import registry
from shared.data.sources.read import SOURCES
from shared.data.spec import Data
from shared.errors import ConfigError
from tests.naming import names_all, naming
from tests.plugin_files import write_distribution

SOURCE = "import numpy as np\n\n\ndef read(data):\n    return np.arange(12.0).reshape(4, 3), np.array([0, 1, 0, 1])\n"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in (registry.VARIABLE, INSTALLED):
        monkeypatch.setenv(name, "")


def test_a_check_of_the_data_reads_a_listed_source(tmp_path, monkeypatch):
    write_distribution(tmp_path)
    (tmp_path / "count").write_text("9")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    data = Data(source="pairs", path=str(tmp_path / "count"))
    [check] = check_examples(data, 0)
    assert check.state == "bad"
    assert names_all(f"{check.finding} {check.remedy}", "field-plug:pairs", registry.VARIABLE)
    export_plugins(["field-plug:pairs"], [], tmp_path)
    [check] = check_examples(data, 0)
    assert (check.state, names_all(check.finding, "9 examples")) == ("ok", True)


def test_a_check_of_the_data_reads_by_the_project_that_a_task_used_last(tmp_path):
    package = tmp_path / "projects" / "air" / "0.1.0" / "air"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "data.py").write_text(SOURCE)
    export_plugins([], ["air"], tmp_path)
    data = Data(source="air.data:read")
    [check] = check_examples(data, 0)
    assert check.state == "bad"  # no task has used any version
    (tmp_path / "projects" / "air" / "current").symlink_to("0.1.0")
    [check] = check_examples(data, 0)
    assert (check.state, names_all(check.finding, "4 examples")) == ("ok", True)


def test_a_project_with_the_name_of_an_installed_package_allows_nothing_of_that(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").touch()
    add_project("numpy", tmp_path)
    assert names_all(caplog.text, "numpy", "not used")
    assert not registry.is_allowed(registry.Plugin("numpy", "load"), "numpy:load")
    with pytest.raises(ConfigError, match=naming("'numpy:load'", "project numpy is not used")):
        registry.find(SOURCES, "numpy:load", "source")
    assert sys.path[-1] == str(tmp_path)
