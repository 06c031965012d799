"""Replay is deterministic: same bytes, the textbook's model, the plan's seconds."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from edge_server.journal import checkpoints
from edge_server.journal.records import AnyRecord, UpdateAccepted, closed_rounds
from edge_server.journal.runs import ORDER
from edge_server.journal.sqlite import read_records
from edge_server.plan.plan import devices
from edge_server.replay.run import memory_folder, replay_name, replay_plan, run_replay
from edge_server.replay.training_executor import TrainingExecutor
from shared.errors import ConfigError
from shared.runtime.state_formats import FILE as FORMATS_FILE
from tests.edge_server.harness import write_examples
from tests.edge_server.processes import forked, until
from tests.edge_server.textbook import NAMES, ROUNDS, SLOW, make_plan, require_equal, textbook
from tests.naming import naming


def test_two_replays_of_a_plan_write_the_same_bytes(tmp_path):
    """Over links so slow that offers are repeated, rounds end by quorum and updates come late."""
    plan = make_plan(tmp_path, more=SLOW, round="deadline_s = 60.0\nquorum = 0.6", evaluation="on_device = true")
    ends = [replay_plan(plan, tmp_path / place / "run") for place in ("one", "two")]
    require_equal(ends[0][0].tree, ends[1][0].tree)
    one, two = ((tmp_path / place / "run" / "journal.jsonl").read_bytes() for place in ("one", "two"))
    assert one == two
    rounds = closed_rounds(ends[0][1])
    assert {len(closed.arrived) for closed in rounds} == {2}
    assert not any(closed.refused for closed in rounds), "an update that comes late is late, not unknown"


@pytest.mark.parametrize("workers", [2, 3])
def test_the_record_is_the_same_for_any_number_of_processes(tmp_path, workers):
    """Byte for byte, with rounds that end by quorum, tasks that are superseded, and evaluations on the devices."""
    data = f"{write_examples(tmp_path, 90)}\nholdout = 0.2"
    hasty = {"round": "deadline_s = 20.0\nquorum = 0.6", "evaluation": "on_device = true", "data": data}
    plan = make_plan(tmp_path, more=SLOW, **hasty)
    for place, several in (("one", 1), ("several", workers)):
        replay_plan(plan, tmp_path / place / "run", workers=several)
    one, several = ((tmp_path / place / "run" / "journal.jsonl").read_bytes() for place in ("one", "several"))
    assert one == several


def test_the_servers_tests_move_nothing(tmp_path):
    """A network with BatchNorm, tested after every round or never: the same bits, which are those it could resume."""
    sections = {
        "model": 'name = "spu_emnist"\noptions = { side = 8, width = 4, classes = 10 }',
        "data": 'source = "digits"\nlimit = 200',
    }
    ends = {}
    for every in (1, 0):
        plan = make_plan(tmp_path, **sections, evaluation=f"every = {every}")
        ends[every], records = replay_plan(plan, tmp_path / f"{every}" / "run")
        assert sum(closed.accuracy is not None for closed in closed_rounds(records)) == (ROUNDS if every else 0)
        kept = checkpoints.load(tmp_path / f"{every}" / "run" / "checkpoints", ROUNDS)
        require_equal(ends[every].tree, kept.tree)
    require_equal(ends[1].tree, ends[0].tree)


def test_agents_live_while_they_have_work(tmp_path):
    """Forty devices, three of them a round: agents grow with the cohort; folders are gone, and so are their updates."""
    plan = make_plan(
        tmp_path,
        rounds=6,
        more="",
        data=write_examples(tmp_path, 400),
        partition='kind = "even"',
        cohort="size = 3\nmin_devices = 40",
    )
    alive, folders, stored = [], [], []
    place = memory_folder(plan, devices(plan, 40)) or Path(tempfile.gettempdir())
    ours = f"fieldfleet-{os.getpid()}-*"

    def tell(record, _virtual_s):
        if isinstance(record, UpdateAccepted):
            [folder] = place.glob(ours)
            folders.append(len(list((folder / "devices").iterdir())))
            stored.append(len([path for path in (folder / "updates").iterdir() if path.name[0] != "."]))
            alive.append(sum(task.get_name().startswith("device-") for task in asyncio.all_tasks()))

    _, records = replay_plan(plan, tmp_path / "run", 40, tell=tell)
    assert len({name for closed in closed_rounds(records) for name in closed.arrived}) > 9
    assert 3 <= max(alive) <= 6  # those of the last round may still tell what it cost
    assert max(folders) <= 6
    assert max(stored) <= 3
    assert not list(place.glob(ours))


def test_a_replay_is_the_textbook_bit_for_bit(tmp_path):
    """Whatever the links are, as long as every update counts."""
    plan = make_plan(tmp_path, more=SLOW, round="deadline_s = 900.0")
    state, records = replay_plan(plan, tmp_path / "run")
    require_equal(state.tree, textbook(plan))
    assert [closed.arrived for closed in closed_rounds(records)] == ROUNDS * [NAMES]


def costs(records: list[AnyRecord]) -> dict[str, float | None]:
    """Return each device's seconds of computing in the first round."""
    first = [one for one in records if isinstance(one, UpdateAccepted) and one.round == 1]
    return {one.device: one.update.cost.compute_s for one in first}


def test_seconds_follow_from_the_plan(tmp_path):
    """3.3 kB come at 2 kB/s and go at 1 kB/s, training takes 5 s, and six messages in turn wait 0.5 s each."""
    one = '[[device]]\nname = "a"\ncompute_s = 5.0\nup_mbit_s = 0.008\ndown_mbit_s = 0.016\ndelay_s = 0.5'
    plan = make_plan(tmp_path, rounds=1, more=one, cohort="min_devices = 1", evaluation="every = 0")
    _, records = replay_plan(plan, tmp_path / "run")
    [closed] = closed_rounds(records)
    seconds = closed.bytes_down["a"] / 2e3 + 5.0 + closed.bytes_up["a"] / 1e3 + 6 * 0.5
    assert closed.bytes_down["a"] == pytest.approx(3300, rel=0.05)
    assert seconds < closed.seconds < seconds + 1.2  # the messages around the frames, 0.5 kB each way
    assert costs(records) == {"a": 5.0}


def test_the_command_replays_into_one_folder(tmp_path):
    """The same plan replaces its own record; a plan that differs in anything has another."""
    plan = make_plan(tmp_path, rounds=1)
    [(folder, records)] = run_replay(tmp_path / "plan.toml", tmp_path, tmp_path / "runs", 0)
    [(again, _)] = run_replay(tmp_path / "plan.toml", tmp_path, tmp_path / "runs", 0)
    assert folder == again
    assert read_records(folder) == records
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {FORMATS_FILE, ORDER, replay_name(plan)}
    assert replay_name(make_plan(tmp_path, rounds=2)) != replay_name(plan)
    assert replay_name(plan, count=2) != replay_name(plan)


def test_a_replay_of_changed_data_warns_that_it_replaces_other_results(tmp_path, caplog):
    make_plan(tmp_path, rounds=1)
    for _ in range(2):
        run_replay(tmp_path / "plan.toml", tmp_path, tmp_path / "runs", 0)
    assert "replaced" not in caplog.text
    write_examples(tmp_path, 93)
    run_replay(tmp_path / "plan.toml", tmp_path, tmp_path / "runs", 0)
    assert caplog.text.count("replaced an earlier replay that had other results") == 1


def test_a_run_is_not_replayed_with_other_examples_than_it_had_unless_that_is_asked_for(tmp_path):
    """Rounds of accuracies that mean nothing were printed without a word."""
    make_plan(tmp_path, rounds=1, partition='kind = "even"')
    runs = tmp_path / "runs"
    [(folder, _)] = run_replay(tmp_path / "plan.toml", tmp_path, runs, 0, 1)
    assert len(closed_rounds(run_replay(folder, tmp_path, runs, 0, 1)[0][1])) == 1
    write_examples(tmp_path, 30)
    with pytest.raises(ConfigError, match=naming(3, "a", 30, 10, "--data-root", "--other-data")):
        run_replay(folder, tmp_path, runs, 0, 1)
    assert len(closed_rounds(run_replay(folder, tmp_path, runs, 0, 1, other_data=True)[0][1])) == 1


def test_a_replay_that_fails_keeps_the_record_of_the_one_before(tmp_path, monkeypatch):
    """It is made aside, so that neither an error nor a second replay at the same time takes a record away."""
    make_plan(tmp_path, rounds=1)
    [(folder, records)] = run_replay(tmp_path / "plan.toml", tmp_path, tmp_path / "runs", 0, 1)
    monkeypatch.setattr(TrainingExecutor, "execute", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run_replay(tmp_path / "plan.toml", tmp_path, tmp_path / "runs", 0, 1)
    assert read_records(folder) == records
    assert set((tmp_path / "runs").iterdir()) == {*(tmp_path / "runs" / one for one in (FORMATS_FILE, ORDER)), folder}


def test_a_folder_of_runs_that_cannot_be_made_is_the_operators_to_correct(tmp_path):
    """One line that names it, no traceback; so are numbers below zero."""
    make_plan(tmp_path, rounds=1)
    with pytest.raises(ConfigError, match=naming(tmp_path / "plan.toml/runs")):
        run_replay(tmp_path / "plan.toml", tmp_path, tmp_path / "plan.toml" / "runs", 0)
    for count, workers in ((-1, 0), (0, -1)):
        with pytest.raises(ConfigError, match=naming("--workers", "--devices")):
            run_replay(tmp_path / "plan.toml", tmp_path, tmp_path / "runs", count, workers)


def test_devices_may_be_more_or_fewer_than_the_plan_names(tmp_path):
    """A study of how a method scales needs no new plan."""
    data = write_examples(tmp_path, 200)
    plan = make_plan(tmp_path, rounds=1, cohort="min_devices = 5", data=data, partition='kind = "even"')
    _, records = replay_plan(plan, tmp_path / "run", 5)
    assert closed_rounds(records)[0].arrived == ("a", "b", "c", "device-3", "device-4")


def test_a_replay_waits_for_no_disk_and_asks_no_sensor(tmp_path, monkeypatch):
    """Where memory has room; no file of this machine's board is opened."""
    plan = make_plan(tmp_path, rounds=1)
    if memory_folder(plan, plan.device) is None:
        pytest.skip("there is no folder in memory with enough room")
    synced, opened, listening = [], [], [True]
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(f"{Path(f'/proc/self/fd/{number}').readlink()}"))

    def hear(event, arguments):
        if event == "open" and listening:
            opened.append(str(arguments[0]))

    sys.addaudithook(hear)
    replay_plan(plan, tmp_path / "run")
    listening.clear()
    assert [path for path in synced if not path.startswith(f"{memory_folder(plan, plan.device)}/")] == []
    assert [path for path in opened if path.startswith("/sys/") and not path.startswith("/sys/fs/cgroup")] == []


@pytest.mark.slow
def test_a_replay_that_is_ended_leaves_nothing_behind(tmp_path):
    """By SIGTERM, in the middle: exit code 130, no process, no folder in memory."""
    make_plan(tmp_path, rounds=1_000_000)
    plan, log = tmp_path / "plan.toml", tmp_path / "log"
    places = ("--data-dir", tmp_path / "runs", "--data-root", tmp_path)
    with forked("replay", plan, *places, "--workers", 2, log=log) as process:
        until(lambda: list(tmp_path.glob("runs/.replay-*/*/checkpoints/round-*")), "the first round")
        family = psutil.Process(process.pid).children()
        process.terminate()
        assert process.wait(300) == 130
    assert len(family) == 2
    assert not [one for one in family if one.is_running()]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [FORMATS_FILE]
    assert "Traceback" not in log.read_text()
    for place in (Path("/dev/shm"), Path(tempfile.gettempdir())):  # noqa: S108 - only looked at
        assert not list(place.glob(f"fieldfleet-{process.pid}-*"))
