"""The whole system as processes over mosquitto: what an operator types, and what kill -9 leaves behind."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path

import psutil
import pytest

from edge_server.journal.costs import costs_by_round
from edge_server.journal.records import UpdateAccepted, closed_rounds
from edge_server.journal.report_history import FILE, latest_reports
from edge_server.journal.sqlite import JOURNAL, read_records
from edge_server.replay.run import replay_plan
from edge_server.rounds.check_plan import load
from tests.edge_server.harness import write_examples, write_plan
from tests.edge_server.processes import (
    PATIENCE_S,
    ROUNDS,
    TINY,
    Ended,
    Field,
    called,
    captured,
    final,
    folder_of,
    started,
    until,
)
from tests.edge_server.textbook import require_equal, textbook
from tests.machine import needs_mosquitto
from tests.naming import names_all

DEVICES = ("device-0", "device-1")
pytestmark = [pytest.mark.broker, pytest.mark.slow, needs_mosquitto]


@pytest.fixture(scope="module")
def tried(tmp_path_factory) -> tuple[Path, Ended]:
    """Return the plan of a finished live trial of two agents, and what the command said.

    It is given in another folder than that of the data sets, which it names by a relative path. The plan says that it
    runs on this machine, not the command line.
    """
    folder = tmp_path_factory.mktemp("tried")
    model = 'name = "mlp"\noptions = { features = 8, hidden = 4, classes = 3 }'
    data = f"{write_examples(folder, 120)}\nholdout = 0.1"
    plan = write_plan(folder, rounds=2, **TINY | {"model": model, "data": data})
    plan.write_text(plan.read_text().replace("rounds = 2", "rounds = 2\nlocal = 2"))
    (folder / "here").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / "here")
        return plan, captured("trial", "run", plan, "--data-dir", folder / "runs", "--data-root", "..")


def test_a_local_trial_ends_with_a_table_and_the_place_of_its_record(tried):
    """Exit code 0, one row a round, every device's bytes, the path that `show` takes.

    A relative folder of data sets starts where the command was given, though the agents' own files lie elsewhere.
    """
    plan, done = tried
    assert done.code == 0, done.err
    folder = folder_of(plan.parent / "runs")
    assert len(list((folder / "local").glob("device-[01].json"))) == 2  # agents of its own
    assert names_all(done.err.splitlines()[0], "tiny", 2, "fedavg")
    rows = [line.split() for line in done.out.splitlines()]
    assert len([row for row in rows if row[-2:] == ["device-0", "device-1"]]) == 1, "the headings"
    assert [row[:2] for row in rows if row and row[0] in "12"] == [["1", "2"], ["2", "2"]]
    assert names_all(done.out, folder, "finished", 2)
    assert names_all(done.err, "2/2")


def test_a_trial_leaves_what_the_devices_measured_and_what_their_uploads_cost(tried, capsys):
    """The last round's with the run, the boards' figures with the site; `devices` shows them."""
    runs = tried[0].parent / "runs"
    costs = costs_by_round(read_records(folder_of(runs)))
    assert {device: cost.upload_s is not None for device, cost in costs[2].items()} == dict.fromkeys(DEVICES, True)
    kept = latest_reports(runs / FILE)
    assert {device: one.report.instance != "" for device, one in kept.items()} == dict.fromkeys(DEVICES, True)
    assert called("devices", "--data-dir", runs, "--format", "json") == 0
    shown = {one["device"]: one for one in json.loads(capsys.readouterr().out)["devices"]}
    assert {device: one["readings"]["memory.total_bytes"]["value"] for device, one in shown.items()} == dict.fromkeys(
        DEVICES, float(psutil.virtual_memory().total)
    )


def test_a_live_trial_its_replay_and_the_textbook_end_at_the_same_bits(tried, tmp_path):
    """Broker, processes, files and time leave no trace in the model; nor in the figures of any round."""
    path, _ = tried
    folder, plan = folder_of(path.parent / "runs"), load(path, path.parent)
    state, records = replay_plan(plan, tmp_path / "replay", 2)
    require_equal(final(folder, 2), textbook(plan, 2))
    require_equal(final(folder, 2), state.tree)
    live = closed_rounds(read_records(folder))
    assert [(one.loss, one.accuracy, one.device_accuracy, one.arrived) for one in live] == [
        (one.loss, one.accuracy, one.device_accuracy, one.arrived) for one in closed_rounds(records)
    ]


def test_a_trial_is_exported_replayed_and_compared(tried, tmp_path, capsys):
    """The trace of a live run gives the same model, bit for bit, and the same bytes of frames and payloads each way."""
    path, _ = tried
    live, trace, root = folder_of(path.parent / "runs"), tmp_path / "trace", ("--data-root", path.parent)
    assert called("trace", "export", live, "--out", trace, *root) == 0
    capsys.readouterr()
    places = ("--compare", live, "--data-dir", tmp_path, *root, "--workers", 1, "--format", "json")
    assert called("replay", trace, *places) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["rounds"]) == ("same", 2)
    assert found["updates"] == {"same": 4, "of": 4}
    assert found["starts"]["same"] == found["starts"]["of"] >= 4
    exact = {one["figure"]: (one["exact"], one["count"]) for one in found["spreads"]}
    assert {exact[name] for name in ("bytes_up", "bytes_down", "payload_up_bytes")} == {(4, 4)}
    assert {exact[name] for name in ("loss", "accuracy", "test_loss", "device_accuracy")} == {(2, 2)}
    assert exact["compute_s"] == (4, 4)


def test_runs_and_show_tell_of_it_to_people_and_to_scripts(tried, capsys):
    """By name and by path, as a table and as JSON; a run that cannot be read hides no other."""
    runs = tried[0].parent / "runs"
    folder = folder_of(runs)
    torn = runs / "torn"
    torn.mkdir()
    (torn / JOURNAL).write_bytes(b"no database" * 100)
    assert called("runs", "--data-dir", runs) == 0
    assert "fedavg" in capsys.readouterr().out
    assert called("runs", "--data-dir", runs, "--format", "json") == 0
    [one] = json.loads(capsys.readouterr().out)
    assert (one["run"], one["rounds"], one["of"], one["outcome"]) == (folder.name, 2, 2, "finished")
    assert called("show", folder.name, "--data-dir", runs) == 0
    table = capsys.readouterr().out
    assert names_all(table, folder)
    assert called("show", folder, "--format", "json") == 0
    assert [one["round"] for one in json.loads(capsys.readouterr().out)["rounds"]] == [1, 2]


def test_a_run_that_is_not_there_is_an_operators_mistake(tried, capsys):
    """Exit code 2, one line, and what to type instead; likewise for one that is torn."""
    runs = tried[0].parent / "runs"
    assert called("show", "nothing", "--data-dir", runs) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert names_all(said.err, "nothing", runs, "edge-server runs")
    assert said.err.count("\n") == 1
    assert called("trial", "run", runs / "nothing.toml", "--data-dir", runs) == 2
    assert names_all(capsys.readouterr().err, runs / "nothing.toml")


def naming(folder: Path) -> list[psutil.Process]:
    """Return the processes on whose command line a path below the folder stands."""
    running = psutil.process_iter(["cmdline"])
    return [one for one in running if any(str(folder) in argument for argument in one.info["cmdline"] or ())]


@pytest.mark.parametrize("moment", ["as the server starts", "in the middle of a round"])
def test_ctrl_c_ends_everything_that_a_trial_started(tmp_path, moment):
    """Exit code 130; no process is left, trainers in sessions of their own included, and nobody listens any more."""
    plan, runs = write_plan(tmp_path, rounds=100000, cohort="min_devices = 1", **TINY), tmp_path / "runs"
    arguments = ("trial", "run", plan, "--local", 1, "--data-dir", runs)
    log = tmp_path / "log"
    with started("edge_server", *arguments, log=log) as process:
        until(lambda: list(runs.glob("*/local/device-0.json")), "the agent")
        if moment == "in the middle of a round":
            until(lambda: b" 3/" in log.read_bytes(), "the third round")
            assert len(naming(tmp_path)) == 5  # itself, broker, server, agent, trainer
        [port] = {int(line.split()[1]) for line in _broker_settings(runs) if line.startswith("listener")}
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 130
        assert naming(tmp_path) == []
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
    said = log.read_text()
    assert said.splitlines()[-1].startswith("edge-server: ")
    assert "Traceback" not in said
    begun = list(runs.glob(f"*/{JOURNAL}"))
    assert ("tiny-" in " ".join(said.splitlines()[-3:])) == bool(begun), "it names the run that can be resumed"


def _broker_settings(runs: Path) -> list[str]:
    [path] = runs.glob("*/local/mosquitto.conf")
    return path.read_text().splitlines()


@pytest.fixture(scope="module")
def site(fleet, tmp_path_factory) -> Field:
    """Return a broker with two agents that wait for a server."""
    return Field(fleet, tmp_path_factory.mktemp("field"))


def test_a_killed_server_goes_on_by_the_same_command(site):
    """kill -9 in the middle of a round; nothing that was stored is asked for again."""
    name = "server"
    with site.server(name) as process:
        until(lambda: site.reached(name, 3, UpdateAccepted), "the middle of the run")
        process.kill()
        assert process.wait() == -signal.SIGKILL
    before = site.records(name)
    assert not site.reached(name, ROUNDS)
    with site.server(name) as process:
        assert process.wait(PATIENCE_S) == 0
    assert site.records(name)[: len(before)] == before
    site.require_whole(name)


def test_a_killed_agent_goes_on_where_it_was(site):
    """kill -9 while it trains; its trainer finishes, the new agent delivers, and the run is as if nothing was."""
    name = "agent"
    with site.server(name) as process:
        until(lambda: site.reached(name, 3), "the middle of the run")
        site.fleet.kill_agent("a")
        site.fleet.agent("a")
        assert process.wait(PATIENCE_S) == 0
    site.require_whole(name)


def test_a_killed_broker_costs_nothing_but_time(site):
    """kill -9, and another on the same port that remembers nothing."""
    name = "broker"
    with site.server(name) as process:
        until(lambda: site.reached(name, 3), "the middle of the run")
        site.fleet.replace_broker()
        assert process.wait(PATIENCE_S) == 0
    site.require_whole(name)
