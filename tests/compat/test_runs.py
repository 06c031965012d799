"""Runs begun by an earlier version: resume, show and replay them without loss."""

from __future__ import annotations

import csv
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.compat.plans import METHODS, Method
from tests.compat.sides import Side, Site, content, lacking, until

ROUNDS, CUT = 4, 2
"""The run is cut in the round after this one."""
HEADER, DIGEST = 3, 16
"""Bytes before and behind the MessagePack of an update that waits on a disk."""
SAME = ("round", "outcome", "arrived", "failed", "refused", "loss", "accuracy", "test_loss", "device_accuracy", "steps")


@dataclass(frozen=True)
class Begun:
    """Two runs of one plan that before began: one undisturbed, one cut and finished by after.

    Attributes:
        waiting: The updates in the devices' outboxes when after took their folders over, by device.
    """

    method: Method
    site: Site
    whole: Path
    cut: Path
    waiting: dict[str, dict[str, Any]]


def outbox(site: Site) -> dict[str, dict[str, Any]]:
    """Return the update that waits on each device's disk, as it travels."""
    paths = {name: list((site.folder / name / "outbox").glob("[!.]*/update")) for name in site.devices}
    return {
        name: msgspec.msgpack.decode(found[0].read_bytes()[HEADER:-DIGEST]) for name, found in paths.items() if found
    }


def asked(side: Side, begun: Begun, folder: Path) -> dict[str, Any]:
    """Return what a side's commands print as JSON, of the undisturbed run and of the cut one; export a trace of each.

    Before asks only of the run that is all its own.
    """
    commands: dict[str, list[object]] = {}
    for name, run in (("whole", begun.whole), ("cut", begun.cut))[: 2 if side.name == "after" else 1]:
        commands[f"show {name}"] = ["show", run]
        commands[f"report {name}"] = ["report", run]
        commands[f"runs {name}"] = ["runs", "--data-dir", run.parent]
        commands[f"devices {name}"] = ["devices", "--data-dir", run.parent]
        if "optimizer" in begun.method.sections:  # else there is nothing to explain
            commands[f"explain {name}"] = ["explain", run, CUT]
    asking = [[*command, "--format", "json"] for command in commands.values()]
    traces = [["trace", "export", run, "--out", folder / run.parent.name] for run in (begun.whole, begun.cut)]
    written = side.commands(*asking, *traces[: 2 if side.name == "after" else 1])
    return {name: json.loads(text) for name, text in zip(commands, written, strict=False)}


def cut_by_before(site: Site, method: Method, old: Side) -> dict[str, dict[str, Any]]:
    """Begin a run with the server of before and kill it, then its agents, in the middle of a round."""
    server = site.start_server(old, method.plan(ROUNDS), "cut")
    until(lambda: site.has_checkpoint("cut", CUT - 1), "a round's end", server)
    began = time.monotonic()
    until(lambda: site.has_checkpoint("cut", CUT), "the next round's end", server)
    time.sleep((time.monotonic() - began) / 2)
    server.kill()
    server.wait()
    assert not site.has_checkpoint("cut", ROUNDS)
    if not method.split:  # a split round's session ends with its server: its device has nothing to deliver
        until(lambda: outbox(site), "an update that waits for a server")
    site.kill_agents()
    return outbox(site)


@pytest.fixture(scope="module", params=METHODS)
def begun(request, old, new, make_site) -> Begun:
    """Run a plan with before alone; cut a second run of it, and finish that with the server and agents of after."""
    method = METHODS[request.param]
    site = make_site(devices=method.devices, data=method.data, partition=method.partition)
    site.start_agents(old)
    whole = site.serve(old, method.plan(ROUNDS), "whole")
    waiting = cut_by_before(site, method, old)
    site.start_agents(new)
    cut = site.serve(new, method.plan(ROUNDS), "cut")
    site.close()
    return Begun(method, site, whole, cut, waiting)


@pytest.fixture(scope="module")
def shown(begun, old, new, tmp_path_factory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Return, by side, a folder of traces and what its commands print."""
    folders = {side.name: tmp_path_factory.mktemp(f"traces-{side.name}") for side in (old, new)}
    return {side.name: (folders[side.name], asked(side, begun, folders[side.name])) for side in (old, new)}


def test_a_cut_run_ends_at_the_bits_of_the_undisturbed_one(begun):
    """The server's final state; in every method, since all devices were in every round and every step."""
    name = f"checkpoints/round-{ROUNDS:06d}.safetensors"
    found = content(begun.cut / name)
    assert len(found) > 1
    assert found == content(begun.whole / name)


def test_a_cut_run_has_the_rounds_of_the_undisturbed_one(begun, shown):
    """Figures and devices of every round, those before the cut and those behind it; it was one run, begun once."""
    past, present = shown["before"][1], shown["after"][1]
    rounds = [past["show whole"]["rounds"], present["show cut"]["rounds"]]
    assert [[one["round"], one["arrived"], one["missed"]] for one in rounds[1]] == [
        [number, sorted(begun.method.devices), {}] for number in range(1, ROUNDS + 1)
    ]
    one, other = ([{key: row[key] for key in SAME} for row in side] for side in rounds)
    assert one == other
    [listed] = present["runs cut"]
    assert (listed["outcome"], listed["rounds"], listed["of"]) == ("finished", ROUNDS, ROUNDS)


def test_devices_end_with_the_states_of_the_undisturbed_run(begun):
    """What after's agents made of the states that before's left: the same bits; FedAvg's devices have none."""
    for device in begun.method.devices:
        states = begun.site.folder / device / "state"
        paths = [states / run.name for run in (begun.whole, begun.cut)]
        assert [path.exists() for path in paths] == [begun.method.name != "fedavg"] * 2
        if paths[0].exists():
            assert content(paths[0]) == content(paths[1])


def test_a_waiting_update_is_delivered_not_trained_again(begun, shown):
    """What lay in the outboxes of before counts in the round after the cut, with the seconds it took then."""
    if begun.method.split:
        assert begun.waiting == {}
        return
    assert begun.waiting
    with (shown["after"][0] / "cut" / "tasks.csv").open() as file:
        tasks = {(row["device"], int(row["round"])): row for row in csv.DictReader(file)}
    for device, update in begun.waiting.items():
        assert update["round"] == CUT + 1
        task = tasks[device, update["round"]]
        assert (task["outcome"], float(task["compute_s"])) == ("arrived", update["cost"]["compute_s"])
        assert task["payload_digest"] == update["params"]["digest"].hex()
    assert outbox(begun.site) == {}


def test_a_journal_of_before_shows_the_same_figures(shown):
    """All that before prints of its own run by any command, after prints as well, and may print more."""
    past, present = shown["before"][1], shown["after"][1]
    assert {"show whole", "report whole", "runs whole", "devices whole"} <= past.keys() < present.keys()
    for name, one in past.items():
        if name == "devices whole":
            for device in (*one["devices"], *present[name]["devices"]):
                device.pop("age_s")  # of the moment when it was asked
        assert one
        assert lacking(one, present[name]) == [], name


def test_a_trace_of_before_replays_to_the_same_bits(begun, shown, new, tmp_path):
    """Exported by before, replayed by after, compared with the run: model, starts and every update."""
    trace = shown["before"][0] / "whole"
    shutil.copytree(begun.whole, tmp_path / "runs" / begun.whole.name)
    places = ("--compare", begun.whole, "--data-dir", tmp_path / "runs", "--workers", 1, "--format", "json")
    found = json.loads(new.commands(["trace", "check", trace], ["replay", trace, *places])[1])
    assert (found["model"], found["rounds"]) == ("same", ROUNDS)
    count = ROUNDS * len(begun.method.devices)
    assert found["updates"] == {"same": count, "of": count}
    assert found["starts"]["same"] == found["starts"]["of"] >= count


def test_both_sides_export_the_same_trace(shown):
    """Of a run of before: every row and figure; after may add columns."""
    past, present = (shown[side][0] / "whole" for side in ("before", "after"))
    tables = sorted(path.name for path in past.glob("*.csv"))
    assert tables
    for name in tables:
        one, other = (list(csv.DictReader((folder / name).read_text().splitlines())) for folder in (past, present))
        assert lacking(one, other) == [], name
    assert lacking(*(json.loads((folder / "trace.json").read_text()) for folder in (past, present))) == []
