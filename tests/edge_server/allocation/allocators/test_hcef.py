"""HCEF's control as an allocator: budgets hold of real bytes, baselines are what they say, nothing makes it fail."""

from __future__ import annotations

import dataclasses
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_server.allocation.allocators.hcef_figures import (
    FARTHEST,
    HcefOptions,
    capped_mean,
    compute_limits,
    spread_estimates,
)
from edge_server.allocation.coordinator import convert_options, decide, round_case
from edge_server.allocation.experience import Experience
from edge_server.allocation.inputs import Case, RoundSetting, Sizes
from edge_server.journal.budget import Ledger, RunSpending
from edge_server.journal.decision import Decision, Figure
from edge_server.journal.records import CostSettled, Gossiped, Measured, RoundOpened, UpdateAccepted
from edge_server.plan.budget import BudgetPlan
from edge_server.plan.optimizer import OptimizerPlan
from edge_server.plan.sites import SitesPlan
from edge_server.rounds.check_plan import load
from shared.algorithms.hcef import steps_taken
from shared.codecs.topk import topk_bytes
from shared.errors import ConfigError
from shared.protocol.measurements import Cost, StepCost
from shared.protocol.messages import Assignment, Hyper, Update
from tests.edge_server.harness import write_plan
from tests.naming import log_messages, naming

WEIGHTS = 269_722
BASELINES = ("hcef", "cef", "cef_f", "cef_c", "mll_sgd")


def table(**options) -> OptimizerPlan:
    return OptimizerPlan(name="hcef", options=options)


def sparse_bytes(share: float) -> int:
    return topk_bytes(WEIGHTS, share)


LADDER = tuple((share, sparse_bytes(share)) for share in HcefOptions().levels())


def fleet(
    seed: int, count: int = 12, *, slow: float = 0.6, poor: float = 0.6, link: float = 1.0, **more: float
) -> Case:
    """Devices as in the paper's settings, with so much of the time and the joules that all steps would take.

    There an update takes a hundredth of the time of its steps; by links of a hundredth of the rate, as long.
    """
    rng = np.random.default_rng(seed)
    clock, rate = rng.uniform(1, 2, count), rng.uniform(1, 5, count) * 1e6 * link
    step_s, step_joules, watts = 150 / clock, 1.5 * clock**2, rng.uniform(0.1, 1, count)
    whole_s = 32 * WEIGHTS / rate
    names = [f"d{place}" for place in range(count)]
    columns = {"step_s": step_s, "step_joules": step_joules, "upload_w": watts, "up_bits_per_s": rate}
    figures = {
        name: {key: Figure(float(column[place]), "measured") for key, column in columns.items()}
        | {"sigma2": Figure(0.3 + 0.1 * place, "measured"), "g2": Figure(1.0, "measured")}
        for place, name in enumerate(names)
    }
    limits = {
        "deadline_s": slow * float((5 * step_s + whole_s).max()),
        "round_joules": poor * float((5 * step_joules + watts * whole_s).sum()),
        "local_steps": 5.0,
        "gradients": 0.0,
        "model_bytes": 4.0 * WEIGHTS,
    }
    return Case(tuple(names), limits | more, figures, LADDER)


def spent(case: Case, decision: Decision) -> tuple[dict[str, float], float]:
    """Return seconds and joules by the equations (8) and (9), with the bytes that updates really take."""
    seconds, joules = {}, 0.0
    for name, one in decision.devices.items():
        figure = {key: found.value for key, found in case.figures[name].items()}
        steps = one.values["steps"] * case.limits["local_steps"] + case.limits["gradients"]
        upload_s = 8 * sparse_bytes(one.values["sent"]) / figure["up_bits_per_s"]
        seconds[name] = steps * figure["step_s"] + upload_s
        joules += steps * figure["step_joules"] + upload_s * figure["upload_w"]
    return seconds, joules


def shares(decision: Decision, name: str) -> list[float]:
    return [float(one.values[name]) for one in decision.devices.values()]


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("gradients", [0.0, 2.0])
def test_deadline_and_joules_hold_of_real_bytes(joint, gradients):
    """To what the table of bytes leaves between its rows."""
    for seed in range(8):
        link = (1.0, 0.01, 0.002)[seed % 3]
        case = fleet(seed, slow=0.4 + 0.05 * seed, poor=1.0 - 0.08 * seed, link=link, gradients=gradients)
        decision = decide(table(joint=joint), case)
        seconds, joules = spent(case, decision)
        if decision.feasible:
            assert max(seconds.values()) <= case.limits["deadline_s"] * 1.003
            assert joules <= case.limits["round_joules"] * 1.003
        for name, one in decision.devices.items():
            assert 0.05 <= one.values["steps"] <= 1
            assert 1e-3 <= one.values["sent"] <= 1
            told = one.predicted
            assert told.compute_s + told.upload_s == pytest.approx(seconds[name], rel=0.01)
            assert told.compute_joules + told.upload_joules > 0


def test_less_is_sent_than_with_positions_that_cost_nothing():
    """The paper counts theta times the model; what is decided for that takes longer than there is time."""
    case, free = fleet(3, slow=0.5, link=0.01), table(joint=True)
    ideal = Case(
        case.devices, case.limits, case.figures, tuple((share, round(4 * WEIGHTS * share)) for share, _ in LADDER)
    )
    real, paper = decide(free, case), decide(free, ideal)
    assert sum(shares(real, "sent")) < sum(shares(paper, "sent"))
    assert max(spent(case, paper)[0].values()) > case.limits["deadline_s"] * 1.003


def test_without_limits_all_is_sent_and_steps_are_the_best_of_the_bound():
    case = fleet(1, slow=1e6, poor=1e6)
    decision = decide(table(), case)
    sigma2 = sum(case.figures[name]["sigma2"].value for name in case.names) / len(case.names)
    assert shares(decision, "sent") == [1.0] * 12
    assert shares(decision, "steps") == pytest.approx([5 / 6 - sigma2 / 6] * 12)
    assert decision.feasible


def test_less_time_makes_slow_devices_take_fewer_steps():
    """And joules that bind are told with their multiplier."""
    easy, hurried = (decide(table(), fleet(2, slow=slow, poor=1e6)) for slow in (0.9, 0.35))
    case = fleet(2)
    slowest = max(case.names, key=lambda name: case.figures[name]["step_s"].value)
    assert hurried.devices[slowest].values["steps"] < easy.devices[slowest].values["steps"]
    assert hurried.devices[slowest].binding == "time"
    assert hurried.devices[slowest].multiplier > 0
    poor = decide(table(), fleet(2, slow=1e6, poor=0.3))
    assert "round_joules" in {one.binding for one in poor.devices.values()}
    assert poor.multiplier > 0


def test_before_anything_is_estimated_no_device_is_held_at_its_floor():
    case = fleet(4, slow=1e6, poor=1e6)
    unknown = {
        name: {key: one for key, one in own.items() if key not in ("sigma2", "g2")}
        for name, own in case.figures.items()
    }
    decision = decide(table(), Case(case.devices, case.limits, unknown, case.ladder))
    assert shares(decision, "steps") == pytest.approx([5 / 6] * 12)
    mixed = {**unknown, "d0": case.figures["d0"]}
    decision = decide(table(), Case(case.devices, case.limits, mixed, case.ladder))
    assert shares(decision, "steps") == pytest.approx([5 / 6 - 0.3 / 6] * 12)


def test_each_baseline_decides_what_it_says():
    case = fleet(5, slow=0.9, poor=0.9)
    found = {one: decide(table(baseline=one), case) for one in BASELINES}
    assert shares(found["cef"], "steps") == shares(found["cef"], "sent") == [1.0] * 12
    assert shares(found["cef_f"], "sent") == [1.0] * 12
    assert len(set(shares(found["cef_f"], "steps"))) > 1
    assert shares(found["cef_c"], "steps") == [1.0] * 12
    assert min(shares(found["cef_c"], "sent")) < 1
    clocks = [case.figures[name]["step_s"].value for name in case.names]
    assert shares(found["mll_sgd"], "steps") == pytest.approx([min(clocks) / one for one in clocks])
    assert shares(found["mll_sgd"], "sent") == [1.0] * 12
    assert found["hcef"].objective <= found["cef_f"].objective + 1e-9
    assert {one.binding for one in found["mll_sgd"].devices.values()} == {"baseline"}


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("scarce", [{"slow": 1e-4}, {"poor": 1e-4}, {"slow": 1e-4, "poor": 1e-4}])
def test_what_cannot_be_met_gives_floors_a_flag_and_what_would_do(baseline, scarce):
    case = fleet(6, **scarce)
    decision = decide(table(baseline=baseline), case)
    assert not decision.feasible
    assert decision.enough
    if baseline == "hcef":
        assert min(shares(decision, "steps")) == pytest.approx(0.05)
    if baseline == "cef_c":
        assert set(shares(decision, "steps")) == {1.0}
    again = Case(case.devices, case.limits | decision.enough, case.figures, case.ladder)
    met = decide(table(baseline=baseline), again)
    assert met.feasible
    assert not met.enough


def test_the_smallest_budgets_of_the_run_are_told_too():
    case = fleet(7, slow=1e-4, poor=1e-4, spent_s=100.0, spent_joules=7.0, rounds_left=4.0)
    enough = decide(table(), case).enough
    assert enough["budget.time_s"] == pytest.approx(100 + 4 * enough["deadline_s"])
    assert enough["budget.joules"] == pytest.approx(7 + 4 * enough["round_joules"])


def test_a_codec_that_sends_all_leaves_only_steps_to_decide():
    case = fleet(8, slow=0.7)
    whole = Case(case.devices, case.limits, case.figures, tuple((share, 4 * WEIGHTS) for share, _ in LADDER))
    decision, steps = decide(table(), whole), decide(table(baseline="cef_f"), case)
    assert shares(decision, "sent") == [1.0] * 12
    assert shares(decision, "steps") == pytest.approx(shares(steps, "steps"), abs=1e-6)


def test_a_deadline_of_a_devices_own_holds_for_it_alone():
    """Where there are several sites, each has its own."""
    case = fleet(9, slow=0.8, poor=1e6)
    own = {**case.figures["d3"], "deadline_s": Figure(0.2 * case.limits["deadline_s"], "measured")}
    decision = decide(table(), Case(case.devices, case.limits, {**case.figures, "d3": own}, LADDER))
    seconds, _ = spent(case, decision)
    assert seconds["d3"] <= 0.2 * case.limits["deadline_s"] * 1.003
    assert max(seconds.values()) > 0.5 * case.limits["deadline_s"]


def test_downloads_and_estimates_are_paid_for_first():
    case = fleet(10, slow=0.6, poor=0.6)
    down = {
        name: {**own, "down_bits_per_s": Figure(1e6, "measured"), "download_joules": Figure(3.0, "measured")}
        for name, own in case.figures.items()
    }
    decision = decide(table(), Case(case.devices, case.limits | {"gradients": 1.0}, down, LADDER))
    for one in decision.devices.values():
        told = one.predicted
        assert told.download_s == pytest.approx(32 * WEIGHTS / 1e6)
        assert told.download_s + told.compute_s + told.upload_s <= case.limits["deadline_s"] * 1.003
    joules = sum(
        one.predicted.download_joules + one.predicted.compute_joules + one.predicted.upload_joules
        for one in decision.devices.values()
    )
    assert joules <= case.limits["round_joules"] * 1.003


def test_many_devices_are_decided_for_at_once_and_no_worse_than_in_turn():
    """In turn, as it was for more than 64 devices, is 2 to 3 % worse mostly."""
    case = fleet(11, count=200)
    usual, turned, joint = (decide(table(**how), case) for how in ({}, {"joint": False}, {"joint": True}))
    assert usual == joint
    assert joint.objective <= turned.objective * (1 + 1e-6)


def test_the_conic_solver_decides_as_well():
    """But for where its sweeps end: what its solver leaves inside the limits is no step any more."""
    case = fleet(12, count=6)
    ours = decide(table(joint=False), case)
    theirs = decide(msgspec.structs.replace(table(joint=False), solver="cvxpy"), case)
    assert theirs.objective == pytest.approx(ours.objective, rel=0.01)
    assert theirs.feasible


FIGURES = st.one_of(st.floats(0, 1e12), st.sampled_from([0.0, math.inf, math.nan, 1e-300, 1e300]))
NAMES = ("step_s", "step_joules", "upload_w", "up_bits_per_s", "down_bits_per_s", "sigma2", "g2", "deadline_s")


@settings(max_examples=40)
@given(
    st.lists(st.dictionaries(st.sampled_from(NAMES), FIGURES, max_size=8), max_size=4),
    st.sampled_from(BASELINES),
    st.floats(0, 1e6),
    st.floats(0, 1e6),
)
def test_whatever_devices_say_there_is_a_decision(told, baseline, seconds, joules):
    figures = {
        f"d{place}": {name: Figure(value, "measured") for name, value in own.items()} for place, own in enumerate(told)
    }
    limits = {"deadline_s": seconds, "round_joules": joules, "local_steps": 5.0, "gradients": 2.0, "model_bytes": 4e6}
    decision = decide(table(baseline=baseline), Case(tuple(figures), limits, figures, LADDER))
    assert decision.devices.keys() == figures.keys()
    for one in decision.devices.values():
        assert 0 <= one.values["steps"] <= 1
        assert 0 < one.values["sent"] <= 1


@pytest.mark.parametrize(
    "options",
    [{"baseline": "fedavg"}, {"rho_min": 0.0}, {"theta_min": 1.5}, {"start": 2.0}, {"w_add": -1.0}, {"g2": 0.0}],
)
def test_options_that_are_none_are_refused(options):
    with pytest.raises(ConfigError, match="hcef"):
        convert_options(table(**options))


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize(
    ("slow", "poor", "link"), [(0.6, 0.6, 1.0), (0.9, 0.4, 0.03), (0.5, 2.0, 0.01), (3.0, 3.0, 1.0)]
)
def test_whole_steps_keep_deadlines_and_joules_and_are_at_most_one_off(joint, slow, poor, link):
    """So what a task really takes is what was decided: no chance is left."""
    counts = set[float]()
    for seed in range(20):
        case = fleet(seed, 40, slow=slow, poor=poor, link=link)
        free = decide(table(joint=joint, rho_min=0.2), case)
        whole = decide(table(joint=joint, whole_steps=True), case)
        assert whole.feasible == free.feasible
        if whole.feasible:
            seconds, joules = spent(case, whole)
            assert max(seconds.values()) <= case.limits["deadline_s"] * 1.003
            assert joules <= case.limits["round_joules"] * 1.003
        for name, one in whole.devices.items():
            count = 5 * float(one.values["steps"])
            assert count == pytest.approx(round(count))
            assert count >= 1
            if link == 1.0:  # else what is left of the seconds is sent, whose positions cost more again
                assert abs(count - 5 * float(free.devices[name].values["steps"])) < 1
                assert one.binding == free.devices[name].binding, "rounding leaves room, but it is not why"
            counts.add(float(one.values["steps"]))
    for share in counts:
        assert {steps_taken(seed, 5, share, "even") for seed in range(50)} == {round(5 * share)}


def test_what_honest_devices_tell_is_averaged_and_one_that_lies_moves_it_little():
    """Whatever it says: to at most a twelfth of ten medians beside eleven others."""
    honest = [0.5 + 0.1 * place for place in range(11)]
    assert capped_mean(honest) == pytest.approx(sum(honest) / 11)
    for lie in (1e3, 1e300, 1.7e308):
        median = honest[5]
        assert capped_mean([*honest, lie]) <= (sum(honest) + FARTHEST * (median + 0.1)) / 12
    assert capped_mean([1.7e308] * 3) > 0, "the sum of all is beyond what a float holds"
    assert capped_mean([0.0] * 7 + [1.0, 3.0]) == pytest.approx(4 / 9), "near the end most tell no gradient at all"
    assert capped_mean([0.0, 0.0]) == 0.0


def test_one_that_lies_about_its_gradients_does_not_bring_all_to_their_floors():
    """By plain means sigma^2 would outweigh G^2, and nobody would take a step more than the least."""
    case = fleet(3, slow=2.0, poor=2.0)
    figures = {name: dict(known) for name, known in case.figures.items()}
    figures["d0"]["sigma2"] = Figure(1e12, "measured")
    steps = [
        one.values["steps"] for one in decide(table(), dataclasses.replace(case, figures=figures)).devices.values()
    ]
    assert min(steps) > 4 * HcefOptions().rho_min


def test_a_mistake_in_its_options_names_file_key_and_remedy(tmp_path):
    path = write_plan(tmp_path, optimizer='name = "hcef"\noptions = { rho = 0.5 }')
    with pytest.raises(ConfigError, match=naming(path, "optimizer", "hcef", "rho", "rho_min")):
        load(path, tmp_path)
    path = write_plan(tmp_path, optimizer='name = "hcef"\noptions = { joint = "always" }')
    with pytest.raises(ConfigError, match=naming(path, "optimizer", "options.joint", "hcef")):
        load(path, tmp_path)


def test_what_no_method_uses_is_told(tmp_path, caplog):
    load(write_plan(tmp_path, optimizer='name = "hcef"'), tmp_path)
    assert log_messages(caplog, "hcef", "steps", "sent", "fedavg")
    caplog.clear()
    load(write_plan(tmp_path, optimizer='name = "hcef"', codec='name = "topk"'), tmp_path)
    assert log_messages(caplog, "hcef", "steps", "fedavg")
    assert not log_messages(caplog, "sent"), "the codec takes `sent`"


SIZES = Sizes(1000, 1000, 4100, 4100, 4100, 4100, facts={"local_steps": 6, "gradients": 2})


def setting(folder, number: int, *, joules: float = 90.0, options: str = "", **more) -> RoundSetting:
    plan = load(write_plan(folder, rounds=10, optimizer=f'name = "hcef"\n{options}'), folder)
    plan = msgspec.structs.replace(plan, budget=BudgetPlan(time_s=100.0, joules=300.0))
    spending = RunSpending(seconds=40.0, joules=joules, charged=0.0, is_whole=True, unmetered=())
    return RoundSetting(plan, number, ("a",), spending, SIZES, LADDER, **more)


def test_limits_are_what_the_budgets_leave(tmp_path):
    """(15b) and (15c) of one edge round a global one: 60 s and 210 J for six rounds."""
    found = compute_limits(HcefOptions(), setting(tmp_path, 5))
    assert (found["deadline_s"], found["round_joules"]) == pytest.approx((10.0, 35.0))
    assert (found["local_steps"], found["gradients"]) == (6.0, 2.0)
    assert compute_limits(HcefOptions(deadline_s=2.0), setting(tmp_path, 5))["deadline_s"] == 2.0
    over = compute_limits(HcefOptions(), setting(tmp_path, 5, joules=500.0))
    assert over["round_joules"] == 0.0
    late = compute_limits(HcefOptions(), setting(tmp_path, 11))
    assert late["deadline_s"] == pytest.approx(30.0)  # that of [round] is less


def test_gradients_cost_time_in_rounds_with_estimates_alone(tmp_path):
    at = setting(tmp_path, 5)
    at = dataclasses.replace(at, sizes=dataclasses.replace(SIZES, facts={**SIZES.facts, "estimate_every": 4}))
    found = [
        compute_limits(HcefOptions(), dataclasses.replace(at, number=number))["gradients"] for number in (1, 2, 4, 5)
    ]
    assert found == [2.0, 0.0, 0.0, 2.0]


@pytest.mark.parametrize(("rounds", "edge_rounds"), [(10, 1), (12, 4)])
@pytest.mark.parametrize("every", [1, 3, 10])
def test_the_cost_of_estimates_is_spread_over_all_rounds(tmp_path, rounds, edge_rounds, every):
    """Each round spends all it may: what is left beside the estimates is the same in every round, and no joule more."""
    at = setting(tmp_path, 1)
    sites = SitesPlan(edge_rounds=edge_rounds, clusters={"one": ["a*"]})
    plan = msgspec.structs.replace(at.plan, rounds=rounds, sites=sites, budget=BudgetPlan(joules=300.0))
    sizes = dataclasses.replace(SIZES, facts={**SIZES.facts, "estimate_every": every})
    figures = {"a": {"step_joules": Figure(2.0, "measured"), "step_s": Figure(0.1, "measured")}}
    spent_j, before, besides = 0.0, {}, list[float]()
    for number in range(1, rounds + 1):
        now = RunSpending(seconds=0.0, joules=spent_j, charged=0.0, is_whole=True, unmetered=())
        round_ = dataclasses.replace(at, plan=plan, sizes=sizes, number=number, spending=now, last_limits=before)
        found = spread_estimates(HcefOptions(), round_, compute_limits(HcefOptions(), round_), figures)
        before = found
        spent_j += found["round_joules"]
        besides.append(found["round_joules"] - 2.0 * found["gradients"])
        ahead = sum(1 for later in range(number, rounds + 1) if not (later - 1) % every)
        assert found["gradients_left"] == 2.0 * ahead
    assert besides == pytest.approx([besides[0]] * rounds)
    assert spent_j == pytest.approx(300.0)


def test_one_device_that_lies_about_a_step_takes_no_rounds_joules_from_all(tmp_path):
    """In a round without estimates: what is put aside for later ones counts it as no more than ten honest ones."""
    sizes = dataclasses.replace(SIZES, facts={**SIZES.facts, "estimate_every": 4})
    honest = {f"d{number}": {"step_joules": Figure(0.1, "measured")} for number in range(20)}
    at = dataclasses.replace(setting(tmp_path, 6), sizes=sizes)
    even, lied = (
        spread_estimates(HcefOptions(), at, compute_limits(HcefOptions(), at), figures)["round_joules"]
        for figures in (honest, {**honest, "liar": {"step_joules": Figure(1e9, "measured")}})
    )
    assert 0 < even - lied < 1


def test_seconds_of_estimates_are_spread_within_the_deadline_of_the_plan(tmp_path):
    """60 s for six rounds, estimates of 2 x 0.5 s in rounds 5 and 9 of ten: 1/3 of them in each."""
    sizes = dataclasses.replace(SIZES, facts={**SIZES.facts, "estimate_every": 4})
    figures = {"a": {"step_s": Figure(0.5, "measured")}, "b": {"step_s": Figure(0.5, "measured")}}

    def seconds(number: int, **options: float) -> float:
        at = dataclasses.replace(setting(tmp_path, number), sizes=sizes)
        chosen = HcefOptions(**options)
        return spread_estimates(chosen, at, compute_limits(chosen, at), figures)["deadline_s"]

    assert seconds(5) == pytest.approx(10 + 1 - 1 / 3)
    assert seconds(6) == pytest.approx(12 - 1 / 5)
    assert seconds(5, deadline_s=2.0) == seconds(6, deadline_s=2.0) == 2.0


def test_what_would_do_for_the_run_counts_estimates_in_their_rounds_alone():
    known = {"spent_s": 100.0, "spent_joules": 7.0, "rounds_left": 4.0, "gradients_left": 3.0, "gradients": 3.0}
    case = fleet(7, slow=1e-4, poor=1e-4, **known)
    enough = decide(table(), case).enough
    other = decide(table(), Case(case.devices, case.limits | {"gradients": 0.0}, case.figures, case.ladder)).enough
    joules = sum(3 * known["step_joules"].value for known in case.figures.values())
    assert enough["budget.joules"] == pytest.approx(7 + 4 * other["round_joules"] + joules, rel=1e-3)
    assert enough["budget.joules"] == pytest.approx(other["budget.joules"], rel=1e-3)
    assert enough["budget.time_s"] < 100 + 4 * enough["deadline_s"]


def test_with_several_sites_the_rest_of_the_run_looks_like_this_edge_round(tmp_path):
    """Two global rounds of five: 40 s and 90 J are spent, 25 s and 60 J of them before the second one."""
    at = setting(tmp_path, 8)
    sites = SitesPlan(edge_rounds=5, clusters={"one": ["a*"], "two": ["b*"]})
    at = dataclasses.replace(at, plan=msgspec.structs.replace(at.plan, sites=sites))
    known = dataclasses.replace(at, last_limits={"before_s": 25.0, "before_joules": 60.0})
    found = compute_limits(HcefOptions(), known)
    mixing_s = 8 * SIZES.bytes / 50e6
    assert found["backhaul_s"] == pytest.approx(mixing_s)
    assert found["deadline_s"] == pytest.approx(((100 - 25) / 1 - (40 - 25) - mixing_s) / 3)
    assert found["round_joules"] == pytest.approx(((300 - 60) / 1 - (90 - 60)) / 3)
    first = compute_limits(HcefOptions(), dataclasses.replace(known, number=6))
    assert (first["before_s"], first["before_joules"]) == (40.0, 90.0)
    assert first["deadline_s"] == pytest.approx((100 - 40 - mixing_s) / 5)


def test_the_backhaul_takes_of_the_time_what_it_took_last(tmp_path):
    """max T_{i,i'} of b.6: of the last gossip; the wait for a slower site is no part of it."""
    at = setting(tmp_path, 8)
    table = SitesPlan(
        edge_rounds=5, clusters={"one": ["a*"], "two": ["b*"]}, backhaul_mbit_s=None, backhaul_delay_s=2.0
    )
    at = dataclasses.replace(at, plan=msgspec.structs.replace(at.plan, sites=table), last_limits={"before_s": 25.0})
    assert compute_limits(HcefOptions(), at)["backhaul_s"] == 2.0
    ledger = Ledger()
    ledger.take([Gossiped(round=5, on=("two",), seconds=60.0, transfer_s={"two": 6.0, "three": 4.0})])
    ledger.take([Gossiped(round=10, on=(), off={"two": "deadline"}, seconds=60.0)])
    spending = dataclasses.replace(at.spending, backhaul_s=ledger.spending().backhaul_s)
    found = compute_limits(HcefOptions(), dataclasses.replace(at, spending=spending))
    assert found["deadline_s"] == pytest.approx(((100 - 25) - (40 - 25) - 6) / 3)
    alone = msgspec.structs.replace(table, clusters={"one": ["a*"]})
    lone = dataclasses.replace(at, plan=msgspec.structs.replace(at.plan, sites=alone))
    assert "backhaul_s" not in compute_limits(HcefOptions(), lone)


def test_smoothed_budgets_follow_slowly_and_never_beyond_what_is_left(tmp_path):
    last = {"deadline_s": 20.0, "round_joules": 1000.0}
    found = compute_limits(HcefOptions(budget_smoothing=0.5), setting(tmp_path, 5, last_limits=last))
    assert found["deadline_s"] == pytest.approx(15.0)
    assert found["round_joules"] == pytest.approx(210.0)


def test_figures_are_those_of_the_newest_task_by_the_steps_that_it_took(tmp_path):
    """Of a task of eight gradients, 4 s and 16 J; then of one that took none, which tells nothing of a step."""
    told = Assignment(seed=1, hyper=Hyper(), values={"local_steps": 8, "steps": 0.5})
    update = Update(run="r", round=1, device="a", params=None, metrics={"sigma2": 3.0, "g2": 2.0})
    experience = Experience()
    experience.take([Measured(by_device={"a": StepCost(steps=5, seconds=0.7, joules=2.5, weights=9, flops=9)})])
    case = round_case(setting(tmp_path, 1), experience, {})
    assert case.figures["a"]["step_s"] == Figure(0.7, "measured")
    assert case.figures["a"]["step_joules"] == Figure(2.5, "measured")
    assert "sigma2" not in case.figures["a"]
    cost = Cost(compute_s=4.0, compute_joules=16.0)
    experience.take(
        [
            RoundOpened(round=1, assignments={"a": told}, decision=decide(table(), case)),
            UpdateAccepted(round=1, device="a", update=msgspec.structs.replace(update, cost=cost), bytes_up=9),
            CostSettled(round=1, device="a", cost=cost),
        ]
    )
    case = round_case(setting(tmp_path, 2), experience, {})
    assert case.figures["a"]["step_s"] == Figure(0.5, "measured")
    assert case.figures["a"]["step_joules"] == Figure(2.0, "measured")
    assert (case.figures["a"]["sigma2"].value, case.figures["a"]["g2"].value) == (3.0, 2.0)
    none = Assignment(seed=1, hyper=Hyper(), values={"local_steps": 0})
    late = Cost(compute_s=0.1)
    experience.take(
        [
            RoundOpened(round=2, assignments={"a": none}, decision=decide(table(), case)),
            UpdateAccepted(round=2, device="a", update=msgspec.structs.replace(update, round=2, cost=late), bytes_up=9),
        ]
    )
    third = round_case(setting(tmp_path, 3), experience, {})
    assert third.figures["a"]["step_s"] == Figure(0.5, "last_good")
    assert third.limits["deadline_s"] == pytest.approx(60 / 8)
