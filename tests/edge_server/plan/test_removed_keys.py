"""Removed plan keys: a new plan is refused, a run that began with them is resumed."""

from __future__ import annotations

import json
import logging
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from edge_server.__main__ import main
from edge_server.cli import commands
from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.records import RunOpened
from edge_server.journal.runs import find_unfinished
from edge_server.journal.sqlite import INSERT, JOURNAL, last_record, read_records
from edge_server.journal.stream import row_mark
from edge_server.plan import removed_keys
from edge_server.plan.plan import Plan
from edge_server.plan.removed_keys import REMOVED_KEYS, drop_removed_keys, without_removed_keys
from edge_server.rounds.check_plan import load
from edge_server.trial.job_runner import ConfiguredRun
from shared.config_reference import every_struct
from shared.errors import ConfigError
from tests.edge_server.harness import write_plan
from tests.naming import log_messages, naming

RADIO = '[[device]]\nname = "a"\n[device.link]\nkind = "wireless"\nbandwidth_hz = 5e6\ndistance_m = 50.0\n'
BANDWIDTH = 'name = "bandwidth"\n[optimizer.options]\ndeadline_s = 9.0\n'
PLANS: dict[str, tuple[dict[str, str], float]] = {
    "round.most_diverged": ({"round": "deadline_s = 60.0\nmost_diverged = 5"}, 5),
    "device[0].link.loss_db_1m": ({"more": f"{RADIO}loss_db_1m = 43.0"}, 43.0),
    "optimizer.options.stale_s": ({"optimizer": f"{BANDWIDTH}stale_s = 60.0"}, 60.0),
}


@pytest.fixture(autouse=True)
def forget_warnings():
    removed_keys.warn_once.cache_clear()


@pytest.mark.parametrize(("place", "sections"), [(place, sections) for place, (sections, _) in PLANS.items()])
def test_a_new_plan_with_a_removed_key_is_refused(tmp_path, place, sections):
    path = write_plan(tmp_path, **sections)
    with pytest.raises(ConfigError, match=naming(path, place, "removed", "delete it")):
        load(path, tmp_path)


def test_every_removed_key_is_reported(tmp_path):
    path = write_plan(tmp_path, round="most_diverged = 3", more=f"{RADIO}loss_db_1m = 40.0")
    with pytest.raises(ConfigError, match=r"most_diverged: .*\n.*loss_db_1m: "):
        load(path, tmp_path)


def test_a_removed_key_does_not_hide_other_faults(tmp_path):
    """With another fault the plan is no plan of any run."""
    path = write_plan(tmp_path, round="most_diverged = 3\nquorum = 7.0")
    with pytest.raises(ConfigError, match="most_diverged"):
        load(path, tmp_path, is_resumed=lambda _: True)


def add_to_journal(folder: Path, change: Any) -> None:
    """Rewrite the first record of a journal as an earlier version would have written it."""
    with closing(sqlite3.connect(folder / JOURNAL)) as connection, connection:
        [(body, _)] = connection.execute("SELECT CAST(body AS BLOB), mark FROM records").fetchall()
        record = json.loads(body)
        change(record["plan"])
        old = msgspec.json.encode(record)
        connection.execute("DELETE FROM records")
        connection.execute(INSERT, (old, row_mark(old, 0)))


@pytest.mark.parametrize(("place", "sections", "value"), [(place, *plan) for place, plan in PLANS.items()])
def test_a_run_that_began_with_a_removed_key_is_resumed(tmp_path, caplog, place, sections, value):
    """By its plan with the key, and without it; the key is reported once."""
    kept = {name: text.rpartition("\n")[0] for name, text in sections.items()}
    new = load(write_plan(tmp_path, **{name: text for name, text in kept.items() if text}), tmp_path)
    runs = tmp_path / "runs"
    store = SqliteStore(runs / "begun", durable=False)
    store.append(RunOpened(run="begun", plan=new, started="20260101T000000Z"))
    store.close()

    def change(plan: dict[str, Any]) -> None:
        tables = {"round": plan["round"], "device[0]": (plan["device"] or [{}])[0].get("link")}
        tables["optimizer"] = (plan["optimizer"] or {}).get("options")
        tables[place.split(".")[0]][place.rpartition(".")[2]] = value

    add_to_journal(runs / "begun", change)
    with caplog.at_level(logging.WARNING):
        [record] = read_records(runs / "begun")
        assert record == last_record(runs / "begun")
        assert isinstance(record, RunOpened)
        assert record.plan == new
        assert find_unfinished(runs, new) == "begun"
        old = write_plan(tmp_path, **sections)
        assert load(old, tmp_path, is_resumed=lambda plan: find_unfinished(runs, plan) == "begun") == new
        store = SqliteStore(runs / "begun", durable=False)
        assert list(store.records()) == [record]
        store.close()
    assert len(log_messages(caplog, place, value, "ignored", "removed", level="WARNING")) == 1
    assert not list((runs / "begun").glob("*corrupt*"))
    with pytest.raises(ConfigError, match="removed"):
        load(old, tmp_path, is_resumed=lambda plan: find_unfinished(tmp_path / "none", plan) is not None)


def test_a_removed_key_at_its_default_is_not_reported(caplog):
    """Journals hold the defaults of all keys."""
    record = json.dumps({"type": "RunOpened", "plan": {"round": {"most_diverged": 3}}}).encode()
    assert json.loads(without_removed_keys(record))["plan"] == {"round": {}}
    assert caplog.records == []


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b'{"plan": 3}', b'{"plan": {"device": [1], "round": 2}}'])
def test_data_without_removed_keys_are_unchanged(data):
    assert without_removed_keys(data) is data


def test_removed_keys_are_not_keys():
    """The table holds no key that a plan may have; each has a reason."""
    assert all(key.reason for key in REMOVED_KEYS)
    fields = {name for struct in every_struct(Plan) for name in struct.__struct_encode_fields__}
    assert not {key.name for key in REMOVED_KEYS} & fields
    plan = {"device": [{"link": {"loss_db_1m": 1.0}}, {"link": {"kind": "given"}}, {}]}
    assert [str(found.place) for found in drop_removed_keys(plan)] == ["device[0].link.loss_db_1m"]


def test_edge_server_run_resumes_a_run_whose_plan_has_a_removed_key(tmp_path, monkeypatch, capsys):
    """Not a run of another plan, and no new run."""
    names: list[str] = []

    async def serve_runs(_config: object, configured: ConfiguredRun, _command: str, **_: object) -> int:
        names.append(configured.name)
        return 0

    def run() -> int | str | None:
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code

    monkeypatch.setattr(commands, "serve_runs", serve_runs)
    monkeypatch.setattr(sys, "argv", ["edge-server", "run", "--config", str(tmp_path / "server.toml")])
    (tmp_path / "server.toml").write_text('plan = "plan.toml"\nsite = "lab"\ndata_root = "."\n')
    new = load(write_plan(tmp_path), tmp_path)
    write_plan(tmp_path, more="[optimizer]\n" + f"{BANDWIDTH}stale_s = 60.0")
    assert run() != 0
    assert "optimizer.options.stale_s: this key was removed" in capsys.readouterr().err
    store = SqliteStore(tmp_path / "runs" / "other", durable=False)
    store.append(RunOpened(run="other", plan=new, started="20260101T000000Z"))
    store.close()
    assert run() != 0
    path = write_plan(tmp_path, more="[optimizer]\n" + BANDWIDTH)
    store = SqliteStore(tmp_path / "runs" / "begun", durable=False)
    store.append(RunOpened(run="begun", plan=load(path, tmp_path), started="20260101T000000Z"))
    store.close()
    write_plan(tmp_path, more="[optimizer]\n" + f"{BANDWIDTH}stale_s = 60.0")
    assert run() == 0
    assert names == ["begun"]
