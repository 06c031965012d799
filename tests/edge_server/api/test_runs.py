"""Runs from Python: in virtual time and live, in scripts and in running event loops, stopped and resumed."""

from __future__ import annotations

import os
import random
import signal
import subprocess  # noqa: TID251 - Ctrl-C must reach a process of its own
import sys
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from edge_server import api
from edge_server.journal import checkpoints
from edge_server.journal.records import closed_rounds
from edge_server.journal.runs import FOLDER
from edge_server.journal.sqlite import JOURNAL
from shared.errors import FieldFleetError
from shared.runtime import malloc
from tests.edge_server.processes import until
from tests.naming import naming

ROOT = Path(__file__).parents[3]
PLAN = {
    "name": "tiny",
    "rounds": 3,
    "algorithm": {"name": "fedavg"},
    "model": {"name": "mlp", "options": {"features": 64, "hidden": 8, "classes": 10}},
    "data": {"source": "digits", "limit": 120, "holdout": 0.1},
    "partition": {"kind": "even"},
    "device": [{"name": "a"}, {"name": "b"}],
}
SITES = {"rounds": 2, "algorithm": {"name": "hcef"}, "sites": {"clusters": {"north": ["a"], "south": ["b"]}}}
NOTEBOOK = "_repr_html_"
"""Method that a notebook asks for the HTML of a value."""
LIVE = """
import sys
from edge_server import api
plan = api.plan({plan!r}, rounds=40)
try:
    api.trial(plan, run="stopped", data_dir="runs")
except KeyboardInterrupt as error:
    print(*error.__notes__)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return api.replay(PLAN, data_dir=tmp_path_factory.mktemp("runs"), progress=False)


def test_a_run_has_rounds_tasks_and_devices(run):
    assert [entry.round for entry in run.rounds] == [1, 2, 3]
    assert {(task.round, task.device) for task in run.tasks} == {(n, name) for n in (1, 2, 3) for name in "ab"}
    assert [device.device for device in run.devices] == ["a", "b"]
    assert run.accuracy == run.rounds[-1].accuracy
    assert (run.outcome.outcome, run.plan.rounds) == ("finished", 3)


@pytest.mark.parametrize(
    ("function", "keyword", "value"),
    [
        *((api.replay, "devices", -1), (api.replay, "devices", "8"), (api.replay, "workers", 1.5)),
        *((api.replay, "progress", "bar"), (api.trial, "agents", -1), (api.trial, "device", "tpu")),
        (api.trial, "run", "../elsewhere"),
    ],
)
def test_an_invalid_keyword_is_named_and_no_run_begins(tmp_path, function, keyword, value):
    with pytest.raises(api.ConfigError, match=naming(keyword, repr(value))):
        function(PLAN, data_dir=tmp_path / "runs", **{"progress": False, keyword: value})
    assert {path.name for path in tmp_path.rglob("*")} <= {"runs", "formats.json"}


async def test_the_same_plan_gives_the_same_run_in_an_event_loop(run, tmp_path):
    again = api.replay(PLAN, data_dir=tmp_path, progress=False)
    assert (again.folder / "journal.jsonl").read_bytes() == (run.folder / "journal.jsonl").read_bytes()
    assert api.compare(run, again).same_model is True


def test_a_run_leaves_the_process_as_it_was(tmp_path, monkeypatch):
    def tune(*_: object) -> None:
        raise AssertionError("the allocator of a program that imports us is not ours")

    monkeypatch.setattr(malloc, "tune", tune)
    threads, umask = torch.get_num_threads(), os.umask(0o022)
    torch.set_num_threads(3)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    active = threading.active_count()
    try:
        folder = api.replay(PLAN, data_dir=tmp_path, progress=False).folder
        assert torch.get_num_threads() == 3
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]  # noqa: NPY002
        assert os.umask(0o022) == 0o022
        assert threading.active_count() == active
        assert folder.stat().st_mode & 0o077 == 0, "models are readable by their user only"
    finally:
        torch.set_num_threads(threads)
        os.umask(umask)


def test_workers_compute_the_same(run, tmp_path):
    again = api.replay(PLAN, workers=2, data_dir=tmp_path, progress=False)
    assert (again.folder / "journal.jsonl").read_bytes() == (run.folder / "journal.jsonl").read_bytes()


def test_a_stored_run_is_opened_and_replayed(run, tmp_path):
    opened = api.open_run(data_dir=run.folder.parent)
    assert opened.folder == run.folder
    assert api.open_run(run.folder).rounds == run.rounds
    again = api.replay(opened, data_dir=tmp_path, progress=False)
    assert api.compare(run, again).same_model is True
    with pytest.raises(api.ConfigError, match=naming("gone")):
        api.open_run("gone", data_dir=tmp_path)


def test_devices_and_exactness_are_options(tmp_path):
    run = api.replay(PLAN, devices=4, exact=True, data_dir=tmp_path, progress=False)
    assert len(run.devices) == 4


def test_the_model_has_the_trained_weights(run):
    network = run.model(round=3)
    state = checkpoints.load(run.folder / FOLDER, 3).tree
    assert not network.training
    assert {name: leaf.tolist() for name, leaf in network.state_dict().items()} == {
        name: leaf.tolist() for name, leaf in state.items()
    }
    assert network(torch.zeros(1, 1, 8, 8)).shape == (1, 10)
    with pytest.raises(api.ConfigError, match=naming("99", "3")):
        run.model(round=99)


def test_frames_have_a_row_for_each_entry(run):
    pd = pytest.importorskip("pandas")
    for table, count in (("rounds", 3), ("tasks", 6), ("devices", 2)):
        frame = run.frame(table)
        assert len(frame) == count
    assert run.frame()["accuracy"].tolist() == [entry.accuracy for entry in run.rounds]
    tasks = run.frame("tasks")
    assert list(tasks.columns[:2]) == ["round", "device"]
    assert tasks["seconds.compute"].sum() == pytest.approx(sum(task.seconds.compute.value for task in run.tasks))
    assert pd.isna(tasks["joules.compute"]).all(), "unknown is not zero"
    with pytest.raises(api.ConfigError, match=naming("round", "rounds")):
        run.frame("round")


def test_frames_need_pandas_and_nothing_else_does(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(api.ConfigError, match=naming("pandas")):
        run.frame()
    assert run.figure().html


def test_notebooks_show_runs_and_comparisons(run, tmp_path):
    again = api.replay(PLAN, devices=3, data_dir=tmp_path, progress=False)
    comparison = api.compare(run, again)
    for shown in (run, run.figure(), comparison, comparison.figure()):
        text = getattr(shown, NOTEBOOK)()
        assert text.startswith('<div class="fieldfleet">')
        assert "<script" not in text
    assert "<svg" in getattr(run.figure(), NOTEBOOK)()
    saved = run.figure().save(tmp_path / "figure.html")
    assert saved.read_text().startswith("<!doctype html>")
    assert comparison.same_model is False
    assert run.name in str(comparison)
    assert again.name in repr(comparison)


def test_progress_is_reported_in_the_callers_thread(tmp_path):
    seen: list[tuple[int, int, int]] = []
    run = api.replay(
        PLAN, data_dir=tmp_path, progress=lambda at: seen.append((threading.get_ident(), at.round, at.rounds))
    )
    assert seen == [(threading.get_ident(), number, 3) for number in range(4)]
    assert run.outcome.outcome == "finished"


def test_a_bar_is_drawn_by_default(tmp_path, capsys):
    api.replay(PLAN, data_dir=tmp_path)
    assert "3/3" in capsys.readouterr().err


def test_ctrl_c_stops_a_replay_and_leaves_nothing(tmp_path):
    """Here from the callback, as it would come while the caller waits."""

    def interrupt(at: api.RoundProgress) -> None:
        if at.round == 1:
            signal.raise_signal(signal.SIGINT)

    threads = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        api.replay(PLAN | {"rounds": 500}, data_dir=tmp_path, progress=interrupt)
    assert threading.active_count() == threads
    assert not list(tmp_path.glob("*/journal.sqlite"))
    assert not list(tmp_path.glob(".replay*"))
    assert api.replay(PLAN, data_dir=tmp_path, progress=False).outcome.outcome == "finished"


def test_an_error_of_a_callback_ends_the_run(tmp_path):
    with pytest.raises(ZeroDivisionError):
        api.replay(PLAN | {"rounds": 500}, data_dir=tmp_path, progress=lambda at: 1 / (at.round - 1))


def test_a_plan_with_sites_has_functions_of_its_own(tmp_path):
    plan = PLAN | SITES
    with pytest.raises(api.ConfigError):
        api.replay(plan, data_dir=tmp_path, progress=False)
    with pytest.raises(api.ConfigError):
        api.trial(plan, data_dir=tmp_path, progress=False)
    with pytest.raises(api.ConfigError):
        api.trial_sites(PLAN, data_dir=tmp_path, progress=False)
    runs = api.replay_sites(plan, data_dir=tmp_path, progress=False)
    assert runs.keys() == {"north", "south"}
    assert all(len(run.rounds) == 2 for run in runs.values())


def test_agents_cannot_import_from_a_notebook(tmp_path):
    def build() -> None:
        """Stand for a function of a notebook's cell."""

    build.__module__ = "__main__"
    with pytest.raises(FieldFleetError):
        api.trial(PLAN | {"model": {"name": build}}, data_dir=tmp_path)


@pytest.mark.slow
@pytest.mark.broker
async def test_a_trial_in_an_event_loop_has_the_bits_of_its_replay(run, tmp_path):
    live = api.trial(PLAN, data_dir=tmp_path, progress=False)
    assert live.outcome.outcome == "finished"
    assert api.compare(live, run).same_model is True
    with pytest.raises(api.ConfigError, match=naming(live.name)):
        api.trial(PLAN, run=live.name, data_dir=tmp_path)


@pytest.mark.slow
@pytest.mark.broker
def test_ctrl_c_stops_a_trial_which_is_then_resumed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(LIVE.format(plan=PLAN))
    command = [sys.executable, str(script)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE) as process:  # noqa: S603
        runs = tmp_path / "runs"

        def rounds() -> int:
            exists = (runs / "stopped" / JOURNAL).exists()
            return len(closed_rounds(api.open_run("stopped", data_dir=runs).records)) if exists else 0

        until(lambda: rounds() >= 2, "two rounds of the trial")
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert b"stopped" in out
    assert children
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
    stopped = api.open_run("stopped", data_dir=runs)
    before = len(stopped.rounds)
    assert before < 40
    with pytest.raises(api.ConfigError, match=naming("stopped", "seed")):
        api.trial(api.plan(PLAN, rounds=40, seed=9), run="stopped", data_dir=runs)
    resumed = api.trial(stopped.plan, run="stopped", data_dir=runs, progress=False)
    assert len(resumed.rounds) == 40
    assert (
        api.compare(resumed, api.replay(stopped.plan, data_dir=tmp_path / "again", progress=False)).same_model is True
    )
