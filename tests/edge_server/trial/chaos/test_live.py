"""The command itself: real processes over mosquitto, killed at random."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest

from edge_server.trial.chaos.kills import KINDS, MARKS, schedule
from edge_server.trial.chaos.log_reader import Logs
from edge_server.trial.local import SERVER
from tests.edge_server.harness import write_examples, write_plan
from tests.edge_server.processes import Ended, called, captured, forked, until
from tests.machine import needs_mosquitto
from tests.naming import names_all

pytestmark = [pytest.mark.broker, pytest.mark.slow, needs_mosquitto]

KILLS, SEED, LIMIT_S = 4, 24849, 300.0  # every kind is among them, two after a mark; `make chaos` makes 200
EARLY_SEED = 125  # the first kill is as soon as the server was started
IDLE_SEED = 17
TOWNS_SEED = 488  # four kinds, a coordinator at some moment and a server in a gossip


def plan(folder: Path, rounds: int = 8, **sections: str) -> Path:
    """Write a plan of two devices whose processes start quickly; it waits for both of them in every round."""
    usual = {
        "model": 'name = "mlp"\noptions = { features = 8, hidden = 64, classes = 3 }',
        "hyper": "batch_size = 8\nlocal_epochs = 20\nmomentum = 0.5",
        "data": write_examples(folder),
        "round": "deadline_s = 120.0",
        "evaluation": "every = 1",
        "more": '[partition]\nkind = "even"',
    }
    return write_plan(folder, rounds=rounds, **usual | sections)


def naming(folder: Path) -> list[list[str]]:
    """Return the command lines on which a path below the folder stands."""
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [words for words in lines if any(str(folder) in word for word in words)]


@pytest.fixture(scope="module")
def studied(tmp_path_factory) -> tuple[Path, Ended]:
    """Return the folder of a study of a few kills, and what the command said."""
    folder = tmp_path_factory.mktemp("chaos")
    where = ("--data-dir", folder / "runs", "--data-root", folder, "--format", "json")
    arguments = ("chaos", plan(folder), "--kills", KILLS, "--seed", SEED, "--local", 2, *where)
    return folder, captured(*arguments, limit_s=LIMIT_S)


def test_nothing_is_lost_whatever_is_killed(studied):
    """Every kill was made; every round, every update once, no training for nothing, the bits of an undisturbed run."""
    _, done = studied
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert (found["problem"], found["holds"]) == ("", True)
    assert len(found["struck"]) == KILLS
    assert {one["kind"] for one in found["struck"]} == set(KINDS)
    assert found["total"]["accepted"] == found["total"]["updates"] == 2 * 8 * len(found["runs"])
    assert found["total"]["difference"] == 0.0
    assert len([line for line in done.err.splitlines() if names_all(line, "16/16", 0)]) == len(found["runs"])
    assert f"{KILLS}/{KILLS}" in done.err


def test_every_mark_is_said_by_our_processes(studied):
    """So that no kill waits for a word that nobody writes any more."""
    folder, _ = studied
    [site] = folder.glob("runs/*/site")
    logs = Logs(site, [SERVER, "device-0", "device-1"])
    said = {(one.by, one.phase) for one in logs.news()}
    assert {mark for kind in KINDS for mark in MARKS[kind]} <= said


def test_no_process_is_left_by_a_study(studied):
    assert naming(studied[0]) == []


TOWNS = """
[optimizer]
name = "hcef"
[sites]
edge_rounds = 3
deadline_s = 120.0
clusters = { north = ["a"], south = ["b"] }
[[device]]
name = "a"
[[device]]
name = "b"
[partition]
kind = "even"
"""


def test_nothing_is_lost_at_several_sites_whatever_is_killed(tmp_path, capsys):
    """The coordinator and a server in the middle of a gossip are among it: the bits of a replay of what was decided."""
    sections = {"algorithm": 'name = "hcef"\noptions = { local_steps = 5, gradients = 2 }', "codec": 'name = "topk"'}
    path = plan(tmp_path, cohort="min_devices = 1", more=TOWNS, rounds=12, **sections)
    where = ("--data-dir", tmp_path / "runs", "--data-root", tmp_path, "--format", "json")
    done = captured("chaos", path, "--kills", 4, "--seed", TOWNS_SEED, *where, limit_s=LIMIT_S)
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert (found["problem"], found["holds"], found["sites"]) == ("", True, 2)
    assert {one["kind"] for one in found["struck"]} == set(KINDS) - {"trainer"} | {"coordinator"}
    assert {one["site"] for one in found["struck"]} <= {"north", "south"}
    names = [one["run"] for one in found["runs"]]
    assert names[:2] == ["tiny-1-north", "tiny-1-south"]
    assert found["total"]["accepted"] == found["total"]["updates"] == 12 * len(names)
    assert (found["total"]["edges_off"], found["total"]["undecided"], found["total"]["difference"]) == (0, 0, 0.0)
    assert naming(tmp_path) == []
    runs = Path(found["record"]) / "runs" / "sites" / "south"
    assert called("sites", "--data-dir", runs, "--format", "json") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["rounds"], said["round"]) == ([12, 12], "3.2")
    assert [(one["site"], one["mixed"], one["missed"], one["last"]) for one in said["peers"]] == [
        ("north", 4, 0, "3.2")
    ]


def test_ctrl_c_leaves_no_process(tmp_path):
    """In the middle of a study, twice, as people do: exit code 130."""
    log, path = tmp_path / "log", plan(tmp_path, cohort="min_devices = 1")
    where = ("--data-dir", tmp_path / "runs", "--data-root", tmp_path)
    arguments = ("chaos", path, "--kills", 1000, "--seed", EARLY_SEED, "--local", 1, *where)
    with forked(*arguments, log=log) as process:
        until(lambda: b"1/1000" in log.read_bytes() or process.poll() is not None, "the first kill")
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert naming(tmp_path) == []
    assert log.read_text().splitlines()[-1] == "edge-server: interrupted"


def test_a_device_that_takes_no_part_keeps_no_study_going(tmp_path):
    """Of two devices every run draws the same one: the trainer of the other one would be waited for without end."""
    path = plan(tmp_path, rounds=1, cohort="size = 1\nmin_devices = 2")
    usual = [kill for kill in schedule(1, IDLE_SEED) if kill.victim == "trainer" and kill.mark is None]
    assert len(usual) == 1
    where = ("--data-dir", tmp_path / "runs", "--data-root", tmp_path, "--format", "json")
    done = captured("chaos", path, "--kills", 1, "--seed", IDLE_SEED, "--local", 2, *where, limit_s=LIMIT_S)
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert [one["kind"] for one in found["struck"]] == ["trainer"]
    assert len(found["runs"]) <= 4
