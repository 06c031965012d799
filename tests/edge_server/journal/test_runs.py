"""Which run a name, or a plan, stands for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.records import RunClosed, RunOpened
from edge_server.journal.runs import (
    LOCAL,
    ORDER,
    SITES,
    all_runs,
    describe_edits,
    ended_runs,
    find_ended_run,
    find_run,
    find_unfinished,
    record_run_order,
    run_exists,
)
from edge_server.journal.sqlite import JOURNAL
from edge_server.plan.plan import Plan
from edge_server.rounds.check_plan import load
from shared.errors import ConfigError, NoSuchRun
from tests.edge_server.harness import write_plan
from tests.naming import naming


@pytest.fixture
def plan(tmp_path) -> Plan:
    return load(write_plan(tmp_path), tmp_path)


def begin(folder: Path, name: str, plan: Plan, started: str, *, closed: bool = False) -> None:
    """Leave a run behind."""
    store = SqliteStore(folder / name, durable=False)
    store.append(RunOpened(run=name, plan=plan, started=started))
    if closed:
        store.append(RunClosed(outcome="finished"))
    store.close()


def test_the_latest_live_run_of_the_very_plan_is_gone_on_with(tmp_path, plan):
    """Not one that has ended, not one of another plan, and not a replay that was interrupted in the same folder."""
    assert find_unfinished(tmp_path / "runs", plan) is None
    begin(tmp_path / "runs", "old", plan, "20260101T000000Z")
    begin(tmp_path / "runs", "new", plan, "20260102T000000Z")
    begin(tmp_path / "runs", "done", plan, "20260103T000000Z", closed=True)
    begin(tmp_path / "runs", "other", load(write_plan(tmp_path, rounds=9), tmp_path), "20260104T000000Z")
    begin(tmp_path / "runs", "replay", plan, "")
    assert find_unfinished(tmp_path / "runs", plan) == "new"
    (tmp_path / "runs" / "old").rename(tmp_path / "aside")
    (tmp_path / "runs" / "new").rename(tmp_path / "away")
    assert find_unfinished(tmp_path / "runs", plan) is None


def test_a_run_with_agents_on_this_machine_is_none_of_the_sites_devices(tmp_path, plan):
    """Neither gone on with by real devices, nor taken for what they have done; by its name it is found all the same."""
    runs = tmp_path / "runs"
    begin(runs, "real", plan, "20260101T000000Z")
    for name, closed in (("interrupted", False), ("ended", True)):
        begin(runs, name, plan, "20260102T000000Z", closed=closed)
        (runs / name / LOCAL).mkdir()
    begin(runs, "edited", load(write_plan(tmp_path, rounds=9), tmp_path), "20260103T000000Z")
    (runs / "edited" / LOCAL).mkdir()
    assert find_unfinished(runs, plan) == "real"
    assert find_ended_run(runs, plan, "") is None
    assert describe_edits(runs, plan) == ""
    found = find_ended_run(runs, plan, "ended")
    assert found
    assert found.folder.name == "ended"
    (runs / "real").rename(tmp_path / "aside")
    assert find_unfinished(runs, plan) is None


def test_runs_that_are_over_are_those_whose_last_record_says_so(tmp_path, plan):
    """The one that ended last stands first; a journal that cannot be read is passed over."""
    for name, closed in (("old", True), ("going-on", False), ("new", True)):
        begin(tmp_path / "runs", name, plan, "20260101T000000Z", closed=closed)
    for second, name in enumerate(("old", "new")):
        os.utime(tmp_path / "runs" / name / JOURNAL, (second, second))
    (tmp_path / "runs" / "torn").mkdir()
    (tmp_path / "runs" / "torn" / JOURNAL).write_bytes(b"no database" * 100)
    assert ended_runs(tmp_path / "runs") == ("new", "old")


@pytest.mark.parametrize("name", ["x" * 300, "x/" * 3000, "a\0b", "", "../..", "absent"], ids=lambda name: name[:6])
def test_a_name_that_no_run_can_have(tmp_path, name):
    """Also one that no file system takes: no such run, and no OSError."""
    assert not run_exists(tmp_path, name)
    with pytest.raises(NoSuchRun):
        find_run(tmp_path, name)


def test_runs_of_sites_on_this_machine_are_found_by_their_names(tmp_path, plan):
    """Each lies in its site's own folder of runs; a name that is whole is no beginning of another one."""
    for site in ("roof", "roof-2"):
        begin(tmp_path / SITES / site, f"tiny-{site}", plan, "20260101T000000Z")
    assert {run.folder.parent.name for run in all_runs(tmp_path)} == {"roof", "roof-2"}
    assert find_run(tmp_path, "tiny-roof").folder == tmp_path / SITES / "roof" / "tiny-roof"
    with pytest.raises(ConfigError, match=naming("tiny", 2, "tiny-roof", "tiny-roof-2")):
        find_run(tmp_path, "tiny")


def test_a_record_keeps_the_order_of_its_plans_sites(tmp_path):
    """Sorted keys would make another ring, other owners of edges and another first coordinator of them."""
    sites = """[sites]\nclusters = { roof = ["a"], barn = ["b"] }\n[[device]]\nname = "a"\n[[device]]\nname = "b"\n"""
    path = write_plan(tmp_path, cohort="min_devices = 1", more=sites)
    begin(tmp_path, "tiny", load(path, tmp_path, several_sites=True), "")
    opened = find_run(tmp_path, "tiny").opened
    assert opened
    assert opened.plan.sites
    assert opened.plan.sites.names == ("roof", "barn")


def test_runs_stand_in_the_order_in_which_they_were_begun_whatever_the_clock_said(tmp_path, plan):
    """A gateway that was in 2030 once had its run of then as the `last` one until 2030."""
    runs = tmp_path / "runs"
    for name, started in (("old", "20240101T000000Z"), ("future", "20300101T000000Z"), ("now", "20261127T000000Z")):
        begin(runs, name, plan, started)
        if name != "old":  # of a version before
            record_run_order(runs / name)
            record_run_order(runs / name)  # its server was started again
    assert [run.folder.name for run in all_runs(runs)] == ["now", "future", "old"]
    assert find_run(runs, "last").folder.name == "now"
    assert find_unfinished(runs, plan) == "now"
    assert (runs / ORDER).read_text() == "future\nnow\n"


def test_the_folder_of_runs_may_be_the_current_one(tmp_path, plan, monkeypatch):
    """`--data-dir .`: the path of a run is then its name alone."""
    monkeypatch.chdir(tmp_path)
    begin(Path(), "first", plan, "20261127T000000Z")
    record_run_order(Path("first"))
    assert find_run(Path(), "last").folder.name == "first"
    assert (tmp_path / ORDER).read_text() == "first\n"
