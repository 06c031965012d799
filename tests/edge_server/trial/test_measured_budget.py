"""Budgets that are a share of what a plan's baseline was measured to take."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from edge_server.__main__ import main
from edge_server.cli import trial
from edge_server.journal.records import AnyRecord, RoundClosed, RoundOpened, RunClosed, RunOpened, UpdateAccepted
from edge_server.plan.budget import BudgetPlan
from edge_server.plan.plan import Plan
from edge_server.rounds.check_plan import load
from edge_server.trial.local import write_plan as write_for_server
from edge_server.trial.measured_budget import BaselineCost, format_budget, make_baseline_plan, read_baseline_cost
from shared.errors import ConfigError, TaskFailed
from shared.protocol.measurements import Cost
from shared.protocol.messages import Assignment, Update
from tests.edge_server.harness import write_plan
from tests.naming import names_all, naming

SITES = '[sites]\nclusters = { south = ["a"], north = ["b"] }\n[[device]]\nname = "a"\n[[device]]\nname = "b"'
HCEF = {
    "algorithm": 'name = "hcef"\noptions = { local_steps = 3, gradients = 2 }',
    "codec": 'name = "topk"',
    "optimizer": 'name = "hcef"\noptions = { rho_min = 0.1 }',
    "budget": "time_s = 5.0",
    "cohort": "min_devices = 1",
    "more": SITES,
}


def planned(folder: Path, **sections: str) -> Plan:
    return load(write_plan(folder, **HCEF | sections), folder, several_sites=True)


def records(
    plan: Plan, device: str, seconds: float, joules: float | None, outcome: str = "finished"
) -> list[AnyRecord]:
    """Return the journal of a run of one round, in which one device told what its task took."""
    part = None if joules is None else joules / 3
    cost = Cost(compute_s=1.0, compute_joules=part, upload_joules=part, download_joules=part)
    update = Update(run="r", round=1, device=device, params=None, start=b"", cost=cost)
    told = UpdateAccepted(round=1, device=device, update=update, bytes_up=1)
    opened = RoundOpened(round=1, assignments={device: Assignment(seed=1, hyper=plan.hyper)}, at=0.0, online=1)
    closed = RoundClosed(round=1, outcome="aggregated", arrived=(device,), seconds=seconds)
    return [RunOpened(run="r", plan=plan), opened, told, closed, RunClosed(outcome=outcome)]


def test_the_baseline_takes_everything_and_has_no_budget(tmp_path):
    """Its estimates, by which nothing is decided, cost nothing; options of the optimizer stay."""
    plan = planned(tmp_path)
    base = make_baseline_plan(plan)
    assert base.optimizer
    assert base.optimizer.options == {"rho_min": 0.1, "baseline": "cef"}
    assert base.algorithm.options == {"local_steps": 3, "gradients": 0}
    assert (base.budget, base.name, base.rounds) == (BudgetPlan(), "tiny-cef", plan.rounds)
    with pytest.raises(ConfigError, match=naming("optimizer", "hcef")):
        make_baseline_plan(msgspec.structs.replace(plan, optimizer=None))


def test_the_slowest_sites_seconds_and_all_sites_joules(tmp_path):
    plan = planned(tmp_path)
    runs = [records(plan, "a", 20.0, 6.0), records(plan, "b", 30.0, 3.0)]
    assert read_baseline_cost(runs) == (30.0, pytest.approx(9.0))
    assert read_baseline_cost([runs[0], records(plan, "b", 30.0, None)]) == (30.0, None)
    assert names_all(format_budget(0.6, BaselineCost(30.0, None)), "30.0 s", 0.6)
    with pytest.raises(TaskFailed):
        read_baseline_cost([runs[0], records(plan, "b", 30.0, 3.0, "stopped")])


def test_a_trial_first_runs_the_baseline_and_then_has_a_share_of_what_that_took(tmp_path, monkeypatch, capsys):
    """Servers read the plan that is written for them: it is the trial's own."""
    ran: list[Plan] = []
    roots: list[str] = []
    monkeypatch.chdir(tmp_path)

    def sites(_options, config, plan, _signals):
        ran.append(plan)
        roots.append(config.data_root)
        folders = tmp_path / "tiny-south", tmp_path / "tiny-north"
        return list(zip(folders, (records(plan, "a", 20.0, 6.0), records(plan, "b", 30.0, 3.0)), strict=True))

    monkeypatch.setattr(trial, "run_at_sites", sites)
    path = write_plan(tmp_path, **HCEF)
    words = ["edge-server", "trial", "run", str(path), "--data-dir", str(tmp_path / "runs")]
    words += ["--data-root", ".", "--cef-share"]

    def called(share: str) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", [*words, share])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, capsys.readouterr().err

    code, said = called("0.6")
    assert code == 0
    assert names_all(said, "30.0 s", "9.0 J", "time_s = 18.0", "joules = 5.4", 0.6)
    assert roots == [str(tmp_path), str(tmp_path)], "servers start in other folders, so that no relative path holds"
    base, plan = ran
    assert base.name == "tiny-cef"
    assert (plan.budget.time_s, plan.budget.joules) == (pytest.approx(18.0), pytest.approx(5.4))
    again = load(write_for_server(plan, tmp_path), tmp_path, several_sites=True)
    assert again == plan
    assert again.sites
    assert again.sites.names == ("south", "north")
    code, said = called("0")
    assert (code, names_all(said, "--cef-share")) == (2, True)


def test_a_connected_fleet_has_no_baseline_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["edge-server", "trial", "run", str(write_plan(tmp_path)), "--cef-share", "0.6"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert names_all(capsys.readouterr().err, "--cef-share")
