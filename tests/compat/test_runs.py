"""A run that the version before began: after goes on with it, shows it, replays it, and loses nothing of it."""

from __future__ import annotations

import csv
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
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


@cache
def shown(side: Side, run: Path) -> list[dict[str, Any]]:
    """Return the rounds of a finished run as a side shows them."""
    rounds: list[dict[str, Any]] = side.figures("show", run)["rounds"]
    return rounds


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


def test_a_cut_run_ends_at_the_bits_of_the_undisturbed_one(begun):
    """The server's final state; in every method, since all devices were in every round and every step."""
    name = f"checkpoints/round-{ROUNDS:06d}.safetensors"
    found = content(begun.cut / name)
    assert len(found) > 1
    assert found == content(begun.whole / name)


def test_a_cut_run_has_the_rounds_of_the_undisturbed_one(begun, old, new):
    """Figures and devices of every round, those before the cut and those behind it; it was one run, begun once."""
    rounds = [shown(old, begun.whole), shown(new, begun.cut)]
    assert [[one["round"], one["arrived"], one["missed"]] for one in rounds[1]] == [
        [number, sorted(begun.method.devices), {}] for number in range(1, ROUNDS + 1)
    ]
    one, other = ([{key: row[key] for key in SAME} for row in side] for side in rounds)
    assert one == other
    [listed] = new.figures("runs", "--data-dir", begun.cut.parent)
    assert (listed["outcome"], listed["rounds"], listed["of"]) == ("finished", ROUNDS, ROUNDS)


def test_devices_end_with_the_states_of_the_undisturbed_run(begun):
    """What after's agents made of the states that before's left: the same bits; FedAvg's devices have none."""
    for device in begun.method.devices:
        states = begun.site.folder / device / "state"
        paths = [states / run.name for run in (begun.whole, begun.cut)]
        assert [path.exists() for path in paths] == [begun.method.name != "fedavg"] * 2
        if paths[0].exists():
            assert content(paths[0]) == content(paths[1])


def test_a_waiting_update_is_delivered_not_trained_again(begun, new, tmp_path):
    """What lay in the outboxes of before counts in the round after the cut, with the seconds it took then."""
    if begun.method.split:
        assert begun.waiting == {}
        return
    assert begun.waiting
    new.output("-m", "edge_server", "trace", "export", begun.cut, "--out", tmp_path / "trace")
    with (tmp_path / "trace" / "tasks.csv").open() as file:
        tasks = {(row["device"], int(row["round"])): row for row in csv.DictReader(file)}
    for device, update in begun.waiting.items():
        assert update["round"] == CUT + 1
        task = tasks[device, update["round"]]
        assert (task["outcome"], float(task["compute_s"])) == ("arrived", update["cost"]["compute_s"])
        assert task["payload_digest"] == update["params"]["digest"].hex()
    assert outbox(begun.site) == {}


def test_a_journal_of_before_shows_the_same_figures(begun, old, new):
    """All that before prints of its own run by any command, after prints as well, and may print more."""
    folder = ("--data-dir", begun.whole.parent)
    assert lacking(shown(old, begun.whole), shown(new, begun.whole)) == []
    commands = [("report", begun.whole), ("runs", *folder), ("devices", *folder)]
    if "optimizer" in begun.method.sections:  # else there is nothing to explain
        commands.append(("explain", begun.whole, CUT))
    for command in commands:
        with ThreadPoolExecutor() as both:
            one, other = both.map(lambda side, given=command: side.figures(*given), (old, new))
        if command[0] == "devices":
            for device in (*one["devices"], *other["devices"]):
                device.pop("age_s")  # of the moment when it was asked
        assert one
        assert lacking(one, other) == [], command


def test_a_trace_of_before_replays_to_the_same_bits(begun, old, new, tmp_path):
    """Exported by before, replayed by after, compared with the run: model, starts and every update."""
    trace = tmp_path / "trace"
    old.output("-m", "edge_server", "trace", "export", begun.whole, "--out", trace)
    new.output("-m", "edge_server", "trace", "check", trace)
    shutil.copytree(begun.whole, tmp_path / "runs" / begun.whole.name)
    places = ("--compare", begun.whole, "--data-dir", tmp_path / "runs", "--workers", 1)
    found = new.figures("replay", trace, *places)
    assert (found["model"], found["rounds"]) == ("same", ROUNDS)
    count = ROUNDS * len(begun.method.devices)
    assert found["updates"] == {"same": count, "of": count}
    assert found["starts"]["same"] == found["starts"]["of"] >= count
