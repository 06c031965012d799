"""`edge-server plan check` reads the plan's data where they are on this machine."""

from __future__ import annotations

import sys

import pytest

from edge_server.__main__ import main
from edge_server.cli.plan.check import check_plan, format_check
from edge_server.rounds import check_data
from shared import registry
from shared.errors import ConfigError
from tests.naming import names_all, naming

PLAN = """
name = "air"
rounds = 1
evaluation = {{ every = 0, on_device = true }}
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
"""
SOUND = "a,b,y\n" + "1,2,3\n4,5,6\n" * 4


CLIENTS = (
    'client_column = "s"\n[partition]\nkind = "client"\n[[device]]\nname = "board-1"\n[[device]]\nname = "board-9"\n'
)
"""End of `[data]` and more, for examples of which board-9 has none."""


def write_plan(folder, inputs=2, data="", task=""):
    path = folder / "plan.toml"
    text = PLAN.format(inputs=inputs).replace("[model]", f"{task}\n[model]") + data
    path.write_text(text)
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


def test_the_network_is_tried_on_what_the_plan_says_of_data_elsewhere(tmp_path):
    """Without a file the columns are known: 2 features in windows of 3 rows, and a horizon of 4."""
    columns = 'feature_columns = ["a", "b"]\nwindow = { length = 3, horizon = 4 }\n'
    with pytest.raises(ConfigError, match=naming("data, model", "2, 3")):
        check_plan(write_plan(tmp_path, data=columns), tmp_path)
    with pytest.raises(ConfigError, match=naming("data, model", "shape 1", "shape 4")):
        check_plan(write_plan(tmp_path, inputs=6, data=columns), tmp_path)


def test_a_loss_that_is_no_number_before_any_training_is_refused(tmp_path, monkeypatch):
    (tmp_path / "air.csv").write_text(SOUND)
    (tmp_path / "checkedtask.py").write_text("def bad(outputs, targets):\n    return (outputs - targets).sum() / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.allow(["checkedtask:*"])
    try:
        with pytest.raises(ConfigError, match=naming("task.loss", "checkedtask:bad", "inf")):
            check_plan(write_plan(tmp_path, task='loss = "checkedtask:bad"'), tmp_path)
    finally:
        registry.allow([])


def test_a_device_without_examples_is_named(tmp_path, monkeypatch):
    """Where only a part is read, it may have some further on."""
    (tmp_path / "air.csv").write_text("s,a,b,y\n" + "board-1,1,2,3\nboard-2,4,5,6\n" * 4)
    path = write_plan(tmp_path, data=CLIENTS)
    with pytest.raises(ConfigError, match=naming("board-9", "board-1, board-2")):
        check_plan(path, tmp_path)
    monkeypatch.setattr(check_data, "MOST_VALUES", 4)
    [check] = check_plan(path, tmp_path).data
    assert any(names_all(note, "board-9") and "board-1" not in note for note in check.notes)


@pytest.mark.parametrize(
    "words",
    [
        ("trial", "run", "plan.toml", "--config", "server.json"),
        ("trial", "run", "plan.toml", "--local", "2"),
        ("replay", "plan.toml", "--devices", "2"),
        ("submit", "plan.toml", "--config", "server.json"),
        ("run", "--config", "server.json"),
    ],
)
def test_a_run_is_refused_by_the_same_check_before_it_waits(tmp_path, monkeypatch, capsys, words):
    """There is no broker, and a trial would wait a minute for it."""
    (tmp_path / "air.csv").write_text(SOUND)
    (tmp_path / "server.json").write_text(
        '{"plan": "plan.toml", "site": "lab", "broker": {"port": 9}, "data_root": "."}'
    )
    write_plan(tmp_path, inputs=3)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FIELDFLEET_DATA", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["edge-server", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert names_all(capsys.readouterr().err, "data, model", "(2,)", "3")
    assert not list(tmp_path.glob("runs/air-*"))
