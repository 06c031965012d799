"""`trial run PLAN` with the fleet that is connected: agents and mosquitto are processes, the command is as typed."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from edge_server.journal.plan_queue import QUEUES
from edge_server.journal.records import (
    Joined,
    Noted,
    RoundClosed,
    RoundOpened,
    RunClosed,
    RunOpened,
    ServerBegan,
    UpdateAccepted,
    closed_rounds,
)
from edge_server.journal.sqlite import read_records
from edge_server.replay.run import replay_plan
from edge_server.rounds.check_plan import load
from edge_server.trial import wait_for_devices
from tests.edge_server.harness import write_plan
from tests.edge_server.processes import PATIENCE_S, TINY, Fleet, called, captured, final, folder_of, forked, until
from tests.edge_server.textbook import require_equal
from tests.machine import free_port, needs_mosquitto, on_terminal, require_whole
from tests.naming import names_all

pytestmark = [pytest.mark.broker, pytest.mark.slow, needs_mosquitto]


def devices(*names: str) -> str:
    return TINY["more"] + "".join(f'\n[[device]]\nname = "{name}"' for name in names)


def plan(folder: Path, *names: str, rounds: int = 2, **keys: str) -> Path:
    """Write a plan that names devices."""
    return write_plan(folder, rounds=rounds, **(TINY | {"more": devices(*names)} | keys))


def config(fleet: Fleet, folder: Path, **keys: object) -> Path:
    """Write a server's file, whose own plan is another one."""
    path = folder / "server.json"
    path.write_text(
        json.dumps({"plan": "no-such.toml", "site": "lab", "run": "old", "broker": fleet.own, "threads": 1} | keys)
    )
    return path


def words(fleet: Fleet, folder: Path, *more: object) -> list[str]:
    """Return the command."""
    places = ("--config", config(fleet, folder), "--data-dir", folder / "runs", "--data-root", folder)
    return [str(one) for one in ("trial", "run", folder / "plan.toml", *places, *more)]


def waits(log: Path) -> list[str]:
    """Return the lines of a log by what waits for devices."""
    return [line for line in log.read_text().splitlines() if f" {wait_for_devices.__name__} " in line]


def typed(*arguments: object) -> tuple[int, str, str]:
    """Run a command in this process; return its exit code, its output, and its errors in one line."""
    code, out, err = captured(*arguments)
    return code, out, " ".join(err.split())


def test_a_plan_runs_with_the_connected_devices_and_its_record_is_that_of_any_run(fleet, tmp_path):
    """The replay ends at the same bits; report, export and comparison read it; JSON is all that is on the output."""
    plan(tmp_path, "a", "b")
    code, out, said = typed(*words(fleet, tmp_path, "--format", "json"))
    assert code == 0
    assert [one["arrived"] for one in json.loads(out)["rounds"]] == [["a", "b"], ["a", "b"]]
    assert names_all(said, 2, "a, b")
    assert "round 2/2" in said
    folder = folder_of(tmp_path / "runs")
    state, _ = replay_plan(load(tmp_path / "plan.toml", tmp_path), tmp_path / "replayed", 2)
    require_equal(final(folder, 2), state.tree)
    runs = ("--data-dir", tmp_path / "runs")
    exported = ("trace", "export", folder.name, *runs, "--out", tmp_path / "trace", "--data-root", tmp_path)
    assert typed(*exported)[0] == 0
    compared = ("replay", folder.name, *runs, "--compare", folder.name, "--data-root", tmp_path, "--workers", 1)
    assert typed(*compared)[0] == 0
    assert typed("report", folder.name, *runs, "--out", tmp_path / "report.html")[0] == 0


def test_a_device_that_the_plan_does_not_name_is_left_out_and_the_record_says_so(fleet, tmp_path):
    """It is given no task, and nothing of it is recorded but why; unless the site takes strangers."""
    plan(tmp_path, "a", rounds=1, cohort="min_devices = 1")
    code, _, said = typed(*words(fleet, tmp_path))
    assert code == 0
    assert names_all(said, "b", "tiny")
    records = read_records(folder_of(tmp_path / "runs"))
    assert [set(one.assignments) for one in records if isinstance(one, RoundOpened)] == [{"a"}]
    assert {one.device for one in records if isinstance(one, Joined)} == {"a"}
    [note] = [one.what for one in records if isinstance(one, Noted)]
    assert names_all(note, "b", "tiny")


def test_progress_and_table_have_whole_figures_on_80_columns(fleet, tmp_path):
    """Both on one terminal."""
    plan(tmp_path, "a", "b", rounds=1)

    def live() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stderr", sys.stdout)
            assert called(*words(fleet, tmp_path)) == 0

    seen = on_terminal(live, 80)
    require_whole(seen, [], 80)
    text = "\n".join(seen)
    assert re.search(r"\btiny-\S+.*\bfedavg", text)
    assert re.search(r"\b\d/2\b", text)
    assert re.search(r"\b0\.\d{4}\b.*\b\d\.\d{4}\b", text)
    [headings] = [
        line.split() for line in seen if {"accuracy", "loss"} <= {*line.split()} and line.split()[0] == "round"
    ]
    assert len(headings) >= 7
    assert any(line.split()[:2] == ["1", "2"] for line in seen)
    assert any(line.split()[-2:] == ["a", "b"] for line in seen)


def test_a_server_waits_for_its_devices_before_the_first_round(fleet, tmp_path):
    """With one of two there it burned every round and ended `finished`; it waits, warns, and begins when both are.

    It says at once who is there and how many are awaited, and again when somebody comes.
    """
    plan(tmp_path, "a", "b", cohort="min_devices = 2\nwait_s = 0.5")
    places = {"data_dir": str(tmp_path / "runs"), "data_root": str(tmp_path)}
    path, log = fleet.config(tmp_path / "server.json", plan="plan.toml", threads=1, **places), tmp_path / "log"
    fleet.kill_agent("b")
    try:
        with forked("run", "--config", path, log=log) as server:
            until(lambda: len(waits(log)) > 1, "warnings")
            assert server.poll() is None
            assert not read_records(folder_of(tmp_path / "runs"))
            fleet.agent("b")
            assert server.wait(PATIENCE_S) == 0
    finally:
        if fleet.processes["b"].poll() is not None:
            fleet.agent("b")
    rounds = closed_rounds(read_records(folder_of(tmp_path / "runs")))
    assert [(one.outcome, one.arrived) for one in rounds] == [("aggregated", ("a", "b"))] * 2
    said = log.read_text()
    first, *_, last = waits(log)
    assert names_all(first, "INFO", 1, 2, "a")
    assert names_all(last, "INFO", 2, "a, b")
    assert f"{first}\n" in said


def test_devices_that_do_not_come_are_named_with_what_helps_and_no_run_is_begun(fleet, tmp_path):
    plan(tmp_path, "a", "c", cohort="min_devices = 2\nwait_s = 1.0")
    code, out, said = typed(*words(fleet, tmp_path))
    assert (code, out) == (1, "")
    assert names_all(said, 1, 2, "a", "1 s", "127.0.0.1", "c", "b")
    assert [one.name for one in (tmp_path / "runs").iterdir() if one.is_dir()] == [QUEUES]


def test_a_broker_that_is_not_there_is_waited_for_as_long_as_the_plan_says(tmp_path):
    plan(tmp_path, "a", "b", cohort="min_devices = 2\nwait_s = 0.5")
    path = tmp_path / "server.json"
    path.write_text(
        json.dumps({"plan": "", "site": "lab", "broker": {"port": free_port()}, "data_dir": str(tmp_path / "runs")})
    )
    code, _, said = typed("trial", "run", tmp_path / "plan.toml", "--config", path, "--data-root", tmp_path)
    assert code == 1
    assert names_all(said, "127.0.0.1", "--local")


@pytest.mark.parametrize(
    ("names", "more", "named"),
    [
        (("a",), (), ("tiny", 1, "cohort.min_devices", 2)),
        (("a", "b"), ("--embedded-broker",), ("--embedded-broker",)),
    ],
)
def test_what_cannot_be_is_something_to_edit(fleet, tmp_path, names, more, named):
    plan(tmp_path, *names)
    code, _, said = typed(*words(fleet, tmp_path, *more))
    assert code == 2
    assert names_all(said, *named)


LABELLED = {"server_data": 'source = "digits"\ndrawn = { per_class = 2 }'}
UNLABELLED = {"algorithm": 'name = "semifl"', "data": 'source = "digits"\nlabels = "none"'}


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (
            {"model": 'name = "mlp"\noptions = { features = 64, hidden = 8, classes = 9 }'},
            ("model", 9, "classes", 10),
        ),
        (
            {"model": 'name = "mlp"\noptions = { features = 63, hidden = 8, classes = 10 }'},
            ("model", "(1, 8, 8)"),
        ),
        ({"data": 'source = "npz"\npath = "absent.npz"'}, ("absent.npz", "data_root")),
        ({"data": 'source = "npz"\npath = "plan.toml"'}, ("plan.toml", ".npz")),
        (
            {"data": 'source = "digits"\nclasses = ["nought", "one"]'},
            ("digits", 9, "data.classes", 2),
        ),
        ({"cohort": "min_devices = 3"}, (2, "cohort.min_devices", 3)),
        ({"algorithm": 'name = "fedmagic"'}, ("algorithm", "fedmagic")),
        (
            UNLABELLED | {"server_data": 'source = "npz"\npath = "wide.npz"'},
            ("server_data", "model", "(1, 9, 9)"),
        ),
        (
            UNLABELLED | {"server_data": 'source = "npz"\npath = "many.npz"'},
            ("server_data", "model", 10, 11),
        ),
        (
            UNLABELLED | {"server_data": 'source = "npz"\npath = "few.npz"'},
            ("server_data", 3),
        ),
        (UNLABELLED | {"server_data": 'source = "digits"\ndrawn = { count = 9 }'}, (9,)),
        (
            UNLABELLED | LABELLED | {"algorithm": 'name = "supervised_only"\noptions = { labelled_queue = 15 }'},
            ("labelled_queue", 15, 16),
        ),
        (
            UNLABELLED | LABELLED | {"algorithm": 'name = "semisfl"\noptions = { threshold = 1.0 }'},
            ("semisfl", "threshold"),
        ),
        (
            UNLABELLED | LABELLED | {"algorithm": 'name = "fedswitch_sl"\noptions = { switch_divergence = inf }'},
            ("fedswitch_sl", "switch_divergence", "inf"),
        ),
    ],
)
def test_a_mistake_is_one_line_and_code_2(fleet, tmp_path, keys, named):
    """Whether it is found before the devices are waited for or after; no round is begun, and no device has a task."""
    for name, side, classes in (("wide", 9, 10), ("many", 8, 12), ("few", 8, 3)):
        pictures = np.zeros((24, side, side), np.uint8)
        np.savez(tmp_path / f"{name}.npz", x_train=pictures, y_train=np.arange(24) % classes)
    plan(tmp_path, "a", "b", evaluation="every = 1", **keys)
    code, out, said = typed(*words(fleet, tmp_path))
    assert (code, out) == (2, "")
    assert names_all(said, *named)
    assert said.count("edge-server: ") == 1
    assert "Traceback" not in said, said
    assert "ExceptionGroup" not in said
    journals = [read_records(one) for one in (tmp_path / "runs").glob("*") if (one / "journal.sqlite").exists()]
    assert not any(isinstance(record, RoundOpened) for records in journals for record in records)


def test_a_run_without_one_round_that_counts_is_no_success(fleet, tmp_path):
    """Two updates of three came, twice: code 1, and the reason on the output, in words and in JSON."""
    plan(tmp_path, "a", "b", round='deadline_s = 60.0\nmin_updates = 3\non_missed = "continue"', evaluation="every = 0")
    code, out, _ = typed(*words(fleet, tmp_path))
    assert code == 1
    assert names_all(out, "[round]")
    folder = folder_of(tmp_path / "runs")
    assert isinstance(read_records(folder)[-1], RunClosed)
    assert read_records(folder)[-1].outcome == "finished"
    places = ("--data-dir", tmp_path / "runs", "--data-root", tmp_path, "--workers", 1, "--format", "json")
    code, out, _ = typed("replay", tmp_path / "plan.toml", *places)
    assert code == 1
    assert names_all(json.loads(out)["short"], "[round]")


def test_a_killed_trial_goes_on_by_the_same_command_and_ctrl_c_says_so(fleet, tmp_path):
    """kill -9 in the middle, then Ctrl-C, then to the end: one run, every update once, every round."""
    slow = "local_epochs = 30\nbatch_size = 8\nlearning_rate = 0.1"
    plan(tmp_path, "a", "b", rounds=6, hyper=slow, evaluation="every = 1")
    log, command = tmp_path / "log", words(fleet, tmp_path)

    def records() -> list:
        folders = [one for one in (tmp_path / "runs").glob("*") if (one / "journal.sqlite").exists()]
        return read_records(folders[0]) if folders else []

    def reached(number: int) -> bool:
        return any(isinstance(one, UpdateAccepted) and one.round >= number for one in records())

    with forked(*command, log=log) as process:
        until(lambda: reached(2), "the second round")
        process.kill()
        process.wait()
    with forked(*command, log=log) as process:
        until(lambda: reached(3), "the third round")
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
    with forked(*command, log=log) as process:
        assert process.wait(PATIENCE_S) == 0
    folder_of(tmp_path / "runs")
    found = records()
    assert [one.round for one in found if isinstance(one, RoundClosed)] == [1, 2, 3, 4, 5, 6]
    accepted = [(one.device, one.round) for one in found if isinstance(one, UpdateAccepted)]
    assert len(accepted) == len(set(accepted)) == 12
    assert [sum(isinstance(one, kind) for one in found) for kind in (RunOpened, ServerBegan, RunClosed)] == [1, 3, 1]
    said = log.read_text()
    assert len(set(re.findall(r"\btiny-\d{8}T\w+-\w+", said))) == 1, "the run that was begun first"
