"""`edge-server run` as a service: resumption, and no second run."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.records import RoundClosed, RunClosed, RunOpened
from edge_server.journal.sqlite import JOURNAL
from edge_server.rounds.check_plan import load
from tests.edge_server.harness import write_plan
from tests.edge_server.processes import captured
from tests.naming import names_all

RUN = "tiny-20261122T000000Z-0123"


def write_config(folder: Path, **keys: object) -> Path:
    path = folder / "server.json"
    places = {"plan": "plan.toml", "data_dir": str(folder / "runs"), "data_root": str(folder)}
    path.write_text(json.dumps(places | {"site": "lab", "threads": 1} | keys))
    return path


@pytest.mark.parametrize(("outcome", "code"), [("finished", 0), ("stopped", 1), ("diverged", 1)])
def test_a_plan_that_has_ended_is_not_begun_again_by_a_restart(tmp_path, outcome, code):
    """A service's restart began it anew each time; it ends with the run's own code, and says how to begin anew."""
    plan = load(write_plan(tmp_path, rounds=1), tmp_path)
    store = SqliteStore(tmp_path / "runs" / RUN)
    closed = RoundClosed(round=1, outcome="aggregated", arrived=(), seconds=1.0)
    store.extend([RunOpened(run=RUN, plan=plan, started="20261122T000000Z"), closed, RunClosed(outcome=outcome)])
    store.close()
    ended = captured("run", "--config", write_config(tmp_path))
    assert ended.code == code
    assert names_all(ended.err, "tiny", RUN, "--again")
    assert [path.parent.name for path in (tmp_path / "runs").glob(f"*/{JOURNAL}")] == [RUN]


def leave_unfinished(folder: Path, name: str, started: str, **sections: str) -> Path:
    """Leave a run that was interrupted, of a plan that says so; return the server's file."""
    plan = load(write_plan(folder, rounds=1, **sections), folder)
    store = SqliteStore(folder / "runs" / name)
    store.append(RunOpened(run=name, plan=plan, started=started))
    store.close()
    return write_config(folder)


def said_by_run(config: Path, monkeypatch, *words: str) -> str:
    """Return what `run` writes until it would serve."""

    def connect(*_: object) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr("edge_server.trial.live.connect_site", connect)
    return captured("run", "--config", config, *words).err


def test_an_edited_plan_says_where_it_differs_and_which_run_it_begins(tmp_path, monkeypatch):
    """It began another run without a word, and the one before stayed as it was."""
    config = leave_unfinished(tmp_path, RUN, "20261122T000000Z")
    assert not names_all(said_by_run(config, monkeypatch), "round.deadline_s")
    write_plan(tmp_path, rounds=3, round="deadline_s = 90.0")
    said = said_by_run(config, monkeypatch)
    assert names_all(said, RUN, "round.deadline_s", "30.0", "90.0", "rounds", 1, 3)
    assert "tiny-" in said.replace(RUN, "")


def test_again_of_a_run_that_is_not_finished_goes_on_with_it_and_says_so(tmp_path, monkeypatch):
    config = leave_unfinished(tmp_path, RUN, "20261122T000000Z")
    said = said_by_run(config, monkeypatch, "--again")
    assert names_all(said, RUN, f"edge-server runs rm {RUN} --config {config}")


def test_a_run_that_the_servers_file_names_is_not_begun_again(tmp_path):
    """Two runs have no one name: the file must say another."""
    plan = load(write_plan(tmp_path, rounds=1), tmp_path)
    store = SqliteStore(tmp_path / "runs" / "mine")
    opened = RunOpened(run="mine", plan=plan, started="20261122T000000Z")
    store.extend([opened, RunClosed(outcome="finished")])
    store.close()
    ended = captured("run", "--config", write_config(tmp_path, run="mine"), "--again")
    assert (ended.code, names_all(ended.err, "mine")) == (2, True)
