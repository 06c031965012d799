"""`edge-server plan check` reads the plan's data where they are on this machine."""

from __future__ import annotations

import pytest

from edge_server.cli.plan.check import check_plan, format_check
from shared.errors import ConfigError
from tests.naming import names_all, naming

PLAN = """
name = "air"
rounds = 1
[task]
kind = "regression"
[model]
name = "mlp"
options = {{ features = {inputs}, classes = 1 }}
[algorithm]
name = "fedavg"
[data]
source = "csv"
path = "air.csv"
target_columns = ["y"]
holdout = 0.25
[evaluation]
every = 0
on_device = true
"""
SOUND = "a,b,y\n" + "1,2,3\n4,5,6\n" * 4


def write_plan(folder, inputs=2):
    path = folder / "plan.toml"
    path.write_text(PLAN.format(inputs=inputs))
    return path


def test_data_elsewhere_are_not_read(tmp_path):
    (check,) = check_plan(write_plan(tmp_path), tmp_path).data
    assert str(tmp_path / "air.csv") in check.finding


def test_data_on_this_machine_are_summarised(tmp_path):
    (tmp_path / "air.csv").write_text(SOUND.replace("6", "3"))
    result = check_plan(write_plan(tmp_path), tmp_path)
    lines = list(format_check(result))
    assert "8 examples of 1 target" in lines[1]
    assert "6 to train on, 2 held out" in lines[1]
    assert names_all(lines[2], "data", "warning", "'y'")


@pytest.mark.parametrize(
    ("content", "inputs", "named"),
    [
        (SOUND + "7,8,high\n", 2, ["line 10", "'y'", "'high'"]),
        (SOUND, 3, ["data", "model", "2", "3"]),
        (SOUND.replace(",", ";"), 2, ["'y'", 'separator = ";"']),
        ("", 2, ["air.csv", "is empty"]),
    ],
)
def test_data_that_cannot_be_trained_on_are_refused(tmp_path, content, inputs, named):
    (tmp_path / "air.csv").write_text(content)
    path = write_plan(tmp_path, inputs)
    with pytest.raises(ConfigError, match=naming(path, *named)):
        check_plan(path, tmp_path)
