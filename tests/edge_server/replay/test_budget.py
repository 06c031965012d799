"""Lower bound of a round's cost, by hand and against replays."""

from __future__ import annotations

import math
import re

import pytest
from msgspec.structs import replace as replace_field

from edge_server.journal.costs import costs_by_round
from edge_server.journal.records import closed_rounds
from edge_server.plan.budget import BudgetPlan
from edge_server.plan.data import resolve_data
from edge_server.plan.devices import DevicePlan
from edge_server.plan.links import GivenLink, RangeLink
from edge_server.plan.simulated_devices import CyclesPower, GivenCompute, GivenPower, RangeCompute
from edge_server.replay.devices.behaviour import Work
from edge_server.replay.devices.build import build_behaviour
from edge_server.replay.feasibility import LowerBound, bound_round, bound_task, require_budgets
from edge_server.replay.run import replay_plan, replay_sites, run_replay
from edge_server.replay.trace import files
from edge_server.replay.trace.trace import Trace
from edge_server.replay.trace.transfer import export
from shared.errors import ConfigError, Infeasible
from tests.edge_server.textbook import make_plan
from tests.naming import naming

WORK = Work(steps=10, examples=0, weights=0, flops=0, run="r", round=1, train=True)


def test_the_least_of_a_task_is_its_links_and_clock_at_their_best():
    """1 kB down at 8 kbit/s is 1 s, 2 kB up at 16 kbit/s is 1 s, 10 Gcycles at 2 GHz are 5 s, six delays of 0.5 s.

    Joules are least at the lowest clock: 1e-28 * 1e10 * 1e18 = 1, and 1 s of sending at 2 W.
    """
    device = DevicePlan(
        name="a",
        compute=RangeCompute(hertz=(1e9, 2e9), cycles_per_step=1e9, again="round"),
        link=RangeLink(up_mbit_s=(0.001, 0.016), down_mbit_s=0.008, again=5.0, delay_s=0.5),
        power=CyclesPower(kappa=1e-28, tx_w=2.0),
    )
    assert bound_task(build_behaviour(device, 0, 0), WORK, 1000, 2000) == pytest.approx(LowerBound(10.0, 3.0))


def test_what_is_drawn_once_is_known():
    device = DevicePlan(name="a", compute=RangeCompute(hertz=(1e9, 2e9), cycles_per_step=1e9))
    behaves = build_behaviour(device, 0, 0)
    assert bound_task(behaves, WORK, 1, 1) == LowerBound(behaves.compute(WORK, 0.0).seconds, None)


def test_a_watt_that_flows_while_idle_makes_the_thriftiest_clock_a_middle_one():
    """E(f) = 1e-28 C f^2 + 0.25 C / f is least at f^3 = 0.25 / 2e-28: 1.08 GHz of a range from 0.5 to 2."""
    device = DevicePlan(
        name="a",
        compute=RangeCompute(hertz=(0.5e9, 2e9), cycles_per_step=1e9, again="round"),
        power=CyclesPower(kappa=1e-28, idle_w=0.25),
    )
    clock = (0.25 / 2e-28) ** (1 / 3)
    least = bound_task(build_behaviour(device, 0, 0), WORK, 0, 0)
    assert least.joules == pytest.approx(1e10 * (1e-28 * clock**2 + 0.25 / clock), rel=1e-3)


@pytest.mark.parametrize(
    ("keys", "least"),
    [
        ({}, LowerBound(40.0, 10.0)),
        ({"cohort": "size = 2\nmin_devices = 2"}, LowerBound(20.0, 3.0)),
        ({"round": "quorum = 0.7\ndeadline_s = 99.0"}, LowerBound(30.0, 6.0)),
        ({"round": "deadline_s = 25.0"}, LowerBound(25.0, 3.0)),
    ],
)
def test_a_round_ends_with_its_quorum_or_its_deadline(tmp_path, keys, least):
    """Four devices of 10 to 40 s and 1 to 4 J; who cannot answer by the deadline may have spent nothing by then."""
    plan = make_plan(tmp_path, **({"cohort": "min_devices = 1", "round": "deadline_s = 99.0"} | keys))
    assert bound_round(plan, [LowerBound(10.0 * k, float(k)) for k in (3, 1, 4, 2)]) == least


def test_a_budget_that_cannot_be_met_is_told_with_the_smallest_that_can(tmp_path):
    tasks = [LowerBound(12.34567, 100.0), LowerBound(10.0, 20.0)]
    for budget, named in (
        ("time_s = 30.0", ("budget.time_s", "30 s", 2, "30.01 s")),
        ("joules = 99.9", ("budget.joules", "99.9 J", 2, "120 J")),
    ):
        plan = make_plan(tmp_path, more=f"[budget]\n{budget}")
        with pytest.raises(Infeasible, match=naming(*named)):
            require_budgets(plan, [LowerBound(15.0, 60.0), LowerBound(15.001, 60.0)])
        require_budgets(plan, [LowerBound(15.0, 49.9), LowerBound(15.0, 50.0)])
    assert bound_round(plan, tasks) == LowerBound(12.34567, 120.0)
    with pytest.raises(ConfigError, match=naming("budget.joules", "[[device]]")):
        require_budgets(plan, [LowerBound(1.0, None)])


def least_seconds(error: Infeasible) -> float:
    """Return the smallest budget that a message names: the largest number of seconds in it."""
    return max(map(float, re.findall(r"(\d+(?:\.\d+)?) s\b", str(error))))


def test_the_smallest_budget_that_is_told_is_met_by_no_less_than_the_replay_takes(tmp_path):
    """Just below what the replay then takes it is refused or not; below the bound always, and the bound is close."""
    keys = {
        "compute": 'kind = "given", seconds = 5.0',
        "link": 'kind = "given", up_mbit_s = 0.1, down_mbit_s = 0.2, delay_s = 0.1',
        "power": 'kind = "given", busy_w = 3.0, tx_w = 1.0, rx_w = 1.0',
    }
    device = '[[device]]\nname = "a"\ncount = 3\n' + "\n".join(f"{key} = {{ {text} }}" for key, text in keys.items())
    plan = make_plan(tmp_path, rounds=2, more=f"{device}\n[budget]\ntime_s = 1.0")
    with pytest.raises(Infeasible, match=naming("budget.time_s", "1 s")) as caught:
        replay_plan(plan, tmp_path / "run")
    told = least_seconds(caught.value)
    plan = make_plan(tmp_path, rounds=2, more=f"{device}\n[budget]\ntime_s = {told}\njoules = 94.0")
    _, records = replay_plan(plan, tmp_path / "run")
    seconds = math.fsum(closed.seconds for closed in closed_rounds(records))
    assert told < seconds < 1.1 * told
    costs = [cost for round_ in costs_by_round(records).values() for cost in round_.values()]
    joules = sum(cost.compute_joules + cost.upload_joules + cost.download_joules for cost in costs)
    assert 94.0 < joules < 1.1 * 94.0
    with pytest.raises(Infeasible, match=naming("budget.joules", "92 J")):
        replay_plan(make_plan(tmp_path, rounds=2, more=f"{device}\n[budget]\njoules = 92.0"), tmp_path / "other")


def test_each_site_must_keep_to_its_part_of_the_joules(tmp_path):
    """Two devices at 10 J a round and one at 40 J: the budget would do for all, and its third does not for the one."""
    device = '[[device]]\nname = "{}"\ncompute_s = 5.0\npower = {{ kind = "given", busy_w = {} }}'
    fleet = "\n".join(device.format(name, watts) for name, watts in (("a", 2.0), ("b", 2.0), ("c", 8.0)))
    sites = '[sites]\nclusters = { cheap = ["a", "b"], dear = ["c"] }'
    more = f"{fleet}\n{sites}\n[budget]\njoules = "
    plan = make_plan(tmp_path, rounds=2, cohort="min_devices = 1", more=f"{more}150.0")
    folders = {site: tmp_path / site for site in ("cheap", "dear")}
    with pytest.raises(Infeasible, match=naming("dear", "budget.joules", "50 J", "80 J")):
        replay_sites(plan, folders)


def test_links_without_limits_take_no_time():
    device = DevicePlan(name="a", compute=GivenCompute(seconds=2.0), link=GivenLink(), power=GivenPower(busy_w=1.0))
    assert bound_task(build_behaviour(device, 0, 0), WORK, 10**9, 10**9) == LowerBound(2.0, 2.0)


@pytest.mark.parametrize("epochs", [2, 4])
def test_another_budget_is_told_at_once_if_the_recorded_devices_cannot_keep_to_it(tmp_path, epochs):
    """With the smallest that they can, which they keep to; a run's own stops no replay of it."""
    folder, told = tmp_path / "recorded", tmp_path / "recorded" / "trace"
    folder.mkdir()
    make_plan(folder)
    [(run, _)] = run_replay(folder / "plan.toml", folder, folder / "runs", 0, 1)
    export(folder / "runs", run.name, told, folder)
    hyper = f"local_epochs = {epochs}\nbatch_size = 8\nlearning_rate = 0.2"
    other = {"hyper": hyper, "rounds": 2, "partition": 'kind = "none"'}
    make_plan(tmp_path, **other | {"more": "[budget]\ntime_s = 1.0"})
    with pytest.raises(Infeasible, match=naming("budget.time_s", "1 s")) as refused:
        run_replay(told, folder, tmp_path, 0, 1, instead=tmp_path / "plan.toml")
    least_s = least_seconds(refused.value)
    make_plan(tmp_path, **other | {"more": f"[budget]\ntime_s = {least_s}"})
    [(_, records)] = run_replay(told, folder, tmp_path, 0, 1, instead=tmp_path / "plan.toml")
    seconds = sum(one.seconds for one in closed_rounds(records))
    assert 0.5 * seconds < least_s <= 1.001 * seconds
    trace = files.read(told)
    short = replace_field(trace.header.plan, budget=BudgetPlan(time_s=1.0))
    own = Trace(replace_field(trace.header, plan=short), trace.tables)
    replay_plan(resolve_data(short, folder), tmp_path / "own", trace=own)
