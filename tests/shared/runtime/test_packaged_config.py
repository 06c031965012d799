"""A Debian package's commands read the file that its service runs with where no other one is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from device_agent.__main__ import main as agent_main
from device_agent.commands.diagnosis.record_board import find_root
from edge_server.__main__ import main as server_main
from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.records import RunOpened
from shared.runtime import extras
from tests.edge_server.textbook import make_plan

AGENT = """
device = "board-1"
site = "roof"
state_dir = "state"
data = {{ source = "digits" }}
[board]
root = "{root}"
"""
BOARDS = Path(__file__).parents[2] / "fixtures" / "boards"


@pytest.fixture
def packaged(tmp_path, monkeypatch):
    """Be the Python of a package whose folder of files is empty, in a working directory without any."""
    monkeypatch.setattr(extras, "is_packaged", lambda: True)
    monkeypatch.setattr(extras, "CONFIG_FOLDER", tmp_path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path


@pytest.fixture
def call(monkeypatch, capsys):
    def run(program, *words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [program.__module__, *words])
        with pytest.raises(SystemExit) as ended:
            program()
        return ended.value.code, *capsys.readouterr()

    return run


def test_lists_of_runs_are_those_of_the_services_file(packaged, call):
    (packaged / "server.toml").write_text('plan = "plan.toml"\nsite = "roof"\ndata_dir = "kept"\n')
    for name in ("kept/here", "elsewhere/runs/there"):
        store = SqliteStore(packaged / name)
        store.append(RunOpened(run=Path(name).name, plan=make_plan(packaged)))
        store.close()
    for words, shown in (((), "here"), (("--data-dir", "runs"), "there")):
        code, out, err = call(server_main, "runs", "--format", "json", *words)
        assert code == 0, err
        assert [one["run"] for one in json.loads(out)] == [shown]


def test_without_a_package_or_its_file_it_must_be_named(packaged, call, monkeypatch):
    code, _, err = call(server_main, "run")
    assert code == 2
    assert "--config" in err
    code, _, err = call(agent_main, "run")
    assert code == 2
    (packaged / "agent.toml").write_text("device = 3\n")
    code, _, err = call(agent_main, "run")
    assert str(packaged / "agent.toml") in err
    monkeypatch.setattr(extras, "is_packaged", lambda: False)
    code, _, err = call(agent_main, "run")
    assert "the following arguments are required: --config" in err


def test_probe_reads_the_board_of_the_services_file(packaged, call):
    board = next(one for one in sorted(BOARDS.iterdir()) if one.is_dir())
    (packaged / "agent.toml").write_text(AGENT.format(root=find_root(str(board))))
    code, out, err = call(agent_main, "probe", "--format", "json")
    assert code == 0, err
    own = json.loads(out)
    code, out, _ = call(agent_main, "probe", "--format", "json", "--root", str(board))
    assert own["facts"] == json.loads(out)["facts"]
