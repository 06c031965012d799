"""`device-agent data check`: what it finds, drift since the last check, and its line in the fleet's view."""

from __future__ import annotations

import argparse
import json

import numpy as np
import pytest

from device_agent.commands import data
from device_agent.config import BoardConfig
from device_agent.measurement.board import open_board
from device_agent.measurement.calibration_file import MeasurementSettings
from device_agent.measurement.link_meter import LinkMeter
from shared.data.check_result import read_check
from shared.errors import ConfigError
from tests.naming import names_all, naming

Image = pytest.importorskip("PIL.Image", reason="Pillow is absent")


@pytest.fixture
def check(tmp_path, capsys):
    """Run the command on a `[data]` section; return its exit code and what it prints as JSON."""

    def run(section, output="json"):
        path = tmp_path / "agent.toml"
        path.write_text(f'device = "board"\nsite = "lab"\nstate_dir = "state"\n[data]\n{section}\n')
        capsys.readouterr()
        code = data.run(argparse.Namespace(verb="check", config=path, format=output))
        printed = capsys.readouterr().out
        return code, json.loads(printed) if output == "json" else printed

    return run


def draw(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (4, 4), value).save(path)


def test_classes_and_damaged_files_and_drift(tmp_path, check):
    """A damaged picture counts but does not hide the others; more pictures of one class are a drift."""
    for number in range(8):
        draw(tmp_path / "pictures" / "ab"[number % 2] / f"{number}.png", 20 * number)
    broken = tmp_path / "pictures" / "a" / "broken.png"
    broken.write_bytes(b"\x89PNG")
    section = 'source = "folder"\npath = "pictures"\nholdout = 0.25'
    code, first = check(section)
    assert (code, first["examples"], first["num_damaged"], first["classes"]) == (1, 8, 1, {"a": 4, "b": 4})
    assert names_all(first["damaged"], broken)
    assert (first["training"], first["held_out"], first["shape"], first["drift"]) == (6, 2, [1, 4, 4], None)
    assert first["mean"][0] == pytest.approx(70 / 255)
    broken.unlink()
    for number in range(8):
        draw(tmp_path / "pictures" / "a" / f"new{number}.png", 250)
    code, second = check(section)
    assert code == 0
    shift = abs(second["mean"][0] - first["mean"][0]) / first["std"][0]
    assert second["drift"] == {"since": first["at"], "examples": 8, "inputs": pytest.approx(shift), "targets": 0.25}
    _, text = check(section, output="table")
    assert names_all(text, "a: 12, b: 4", "0 files", "1x4x4")


def test_quantiles_of_numeric_targets(tmp_path, check):
    path = tmp_path / "air.csv"
    path.write_text("temp,ozone\n" + "".join(f"{at},{at * 10}\n" for at in range(5)))
    section = 'source = "csv"\npath = "air.csv"\ntarget_columns = ["ozone"]\nlimit = 100'
    _, first = check(section)
    assert first["quantiles"] == {"ozone": [0, 10, 20, 30, 40]}
    path.write_text("temp,ozone\n" + "".join(f"{at},{at * 10 + 30}\n" for at in range(5)))
    _, second = check(section)
    assert (second["drift"]["targets"], second["drift"]["inputs"]) == (1.5, 0)
    _, text = check(section, output="table")
    assert names_all(text, "ozone", "30 40 50 60 70")


def test_examples_that_cannot_be_used(tmp_path, check):
    (tmp_path / "air.csv").write_text("temp,ozone\n1,high\n")
    with pytest.raises(ConfigError, match=naming("line 2", "'ozone'", "'high'")):
        check('source = "csv"\npath = "air.csv"\ntarget_columns = ["ozone"]')
    assert not (tmp_path / "state").exists()


def test_the_last_check_is_a_fact_of_the_boards_reports(tmp_path, check):
    np.savez(tmp_path / "a.npz", x=np.arange(12.0).reshape(6, 2), y=np.arange(6) % 2)
    _, printed = check('source = "npz"\npath = "a.npz"')
    state_dir = tmp_path / "state"
    board = open_board(MeasurementSettings(board=BoardConfig(root=str(tmp_path), profile="generic-arm")))
    fact = board.report("board", LinkMeter(), state_dir).facts["data"]
    assert names_all(fact, "6 examples", "2 classes", printed["at"])
    assert read_check(state_dir).summary() == fact
