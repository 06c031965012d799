"""What each optimizer is asked and what comes of it: by hand, by properties, for devices that talk nonsense."""

from __future__ import annotations

import dataclasses
import math
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_server.allocation.coordinator import decide
from edge_server.allocation.inputs import Case, recorded_case
from edge_server.journal.decision import Decision, DeviceDecision, Figure
from edge_server.plan.optimizer import OptimizerPlan
from shared.errors import ConfigError

LIMITS = {
    "deadline_s": 10.0,
    "weights": 1000.0,
    "weights_global": 800.0,
    "global_steps": 5.0,
    "personal_steps": 5.0,
    "warmup_steps": 1.0,
}
BANDWIDTH = OptimizerPlan(name="bandwidth", options={"most_pruned": 1.0, "marks": False})


def band(figures: dict[str, tuple[float, float]], **limits: float) -> Case:
    """Return a case of devices with a rate in bit/s and the seconds of a step."""
    told = {
        device: {"up_bits_per_s": Figure(rate, "measured"), "step_s": Figure(step_s, "measured")}
        for device, (rate, step_s) in figures.items()
    }
    return Case(tuple(figures), {**LIMITS, **limits}, told)


def latency_s(case: Case, decision: Decision, device: str) -> float:
    """Return (28) from the decision's own values."""
    limits, values = case.limits, decision.devices[device].values
    step = case.figures[device]["step_s"].value
    shared = limits["weights_global"] / limits["weights"]
    kept, share = 1 - values["prune"], values["share"]
    before = (5 * (1 - shared) + shared) * step
    bits = 32 * limits["weights_global"]
    sent = bits / (share * case.figures[device]["up_bits_per_s"].value) if share else 0.0
    return before + kept * (5 * shared * step + sent)


def test_devices_are_dealt_to_clusters_and_stay_there():
    table = OptimizerPlan(name="clusters", options={"keep": "0.2,0.6,1"})
    places = {name: place for place, name in enumerate("abcdefg")}
    first = decide(table, Case(("b", "e", "g"), places=places)).allocation
    later = decide(table, Case(("a", "b", "c", "d", "e"), places=places)).allocation
    assert first == {"b": {"keep": 0.6}, "e": {"keep": 0.6}, "g": {"keep": 0.2}}
    assert [later[name]["keep"] for name in "abcde"] == [0.2, 0.6, 1.0, 0.2, 0.6]


def test_nobody_and_somebody_twice():
    """No device, no decision; one that is named twice is one."""
    assert decide(BANDWIDTH, Case((), LIMITS)).devices == {}
    twice = band({"a": (1e5, 0.1)})
    twice = Case(("a", "a"), twice.limits, twice.figures)
    assert decide(BANDWIDTH, twice) == decide(BANDWIDTH, band({"a": (1e5, 0.1)}))


def test_a_single_device_that_has_time_keeps_everything():
    decision = decide(BANDWIDTH, band({"a": (1e5, 0.1)}))
    given_ = decision.devices["a"]
    assert given_.values["prune"] == 0.0
    assert given_.binding == "full"
    assert given_.values["share"] == pytest.approx(1.0)  # nobody else needs what it needs not
    assert given_.values["up_bits_per_s"] == pytest.approx(given_.values["share"] * 1e5)
    assert decision.feasible


def test_nobody_is_held_to_a_guess():
    """A device whose rate is a default sends as fast as it can, and so shows what that is."""
    case = band({"a": (1e5, 0.1)})
    guessed = {"a": {**case.figures["a"], "up_bits_per_s": Figure(1e5, "default")}}
    values = decide(BANDWIDTH, Case(("a",), case.limits, guessed)).devices["a"].values
    assert values.keys() == {"prune", "share"}


def test_the_deadline_holds_by_construction():
    case = band({"a": (2000.0, 0.5), "b": (9000.0, 0.9), "c": (30_000.0, 0.2)})
    decision = decide(BANDWIDTH, case)
    for device, one in decision.devices.items():
        assert latency_s(case, decision, device) <= 10.0 * (1 + 1e-9)
        predicted = (one.predicted.compute_s or 0) + (one.predicted.upload_s or 0)
        spared = 0.8 * case.figures[device]["step_s"].value if one.values["prune"] == 0 else 0.0  # without pruning, no
        assert predicted + spared == pytest.approx(latency_s(case, decision, device))  # warm-up, which (28) has
    assert sum(one.values["share"] for one in decision.devices.values()) <= 1 + 1e-12


@pytest.mark.parametrize("figures", [(1.0, 0.5), (1e5, 1e6)], ids=["no rate to speak of", "no clock to speak of"])
def test_a_device_that_cannot_is_left_out_and_the_flag_says_what_would_do(figures):
    table = OptimizerPlan(name="bandwidth")
    decision = decide(table, band({"slow": figures, "good": (1e5, 0.1)}))
    assert decision.devices["slow"].values["prune"] > 0.9
    assert not decision.feasible
    assert decision.enough["deadline_s"] > 10.0
    longer_s = 1.001 * decision.enough["deadline_s"]
    assert decide(table, band({"slow": figures, "good": (1e5, 0.1)}, deadline_s=longer_s)).feasible


def test_nobody_in_a_feasible_decision_is_late_with_its_marks_and_biases():
    """Also where there is no floor, so that devices flip between nothing and something and the marks never settle."""
    table, limits = OptimizerPlan(name="bandwidth", options={"most_pruned": 1.0}), {"dense_bytes": 120.0}
    for seed in range(150):
        random = Random(seed)
        figures = {f"d{place}": (10 ** random.uniform(3, 5.5), 10 ** random.uniform(-2.5, 0)) for place in range(9)}
        case = band(figures, **limits, deadline_s=10 ** random.uniform(0, 2))
        for device, one in decide(table, case).devices.items():
            kept, share = 1 - one.values["prune"], one.values["share"]
            if kept and share:
                marks = 800 * min(1, 32 * kept) * (kept < 1) + 8 * 120.0
                extra = marks / (share * figures[device][0])
                bits_s = 32 * 800 / (share * figures[device][0]) * kept
                step = figures[device][1]
                took = (5 * 0.2 + 0.8 * (kept < 1)) * step + kept * 4 * step + bits_s + extra
                assert took <= case.limits["deadline_s"] * (1 + 1e-9), (seed, device)


SLOW = {"slow": (350.0, 0.3), **{f"d{place}": (8000.0, 0.3) for place in range(5)}}


def test_fairness_caps_what_the_floor_of_one_slow_device_takes_from_the_others():
    """Without it, as in the paper, most of the uplink is the slow one's; capped it is told so, and what would do."""
    case = band(SLOW, deadline_s=11.0)
    paper = decide(OptimizerPlan(name="bandwidth", options={"most_pruned": 0.9, "marks": False}), case)
    table = OptimizerPlan(name="bandwidth", options={"most_pruned": 0.9, "marks": False, "fairness": 2.0})
    fair = decide(table, case)
    assert paper.devices["slow"].values["share"] > 0.5
    assert (paper.devices["slow"].binding, paper.feasible) == ("floor", True)
    assert fair.devices["slow"].values["share"] == pytest.approx(2 / 6)
    assert (fair.devices["slow"].binding, fair.feasible) == ("fairness", False)
    for device in SLOW.keys() - {"slow"}:
        assert fair.devices[device].values["prune"] < paper.devices[device].values["prune"] - 0.1
        assert fair.devices[device].values["share"] <= 2 / 6 + 1e-12
    longer = band(SLOW, deadline_s=1.001 * fair.enough["deadline_s"])
    assert decide(table, longer).feasible
    assert not decide(table, band(SLOW, deadline_s=0.98 * fair.enough["deadline_s"])).feasible


def test_equal_parts_at_most_are_equal_parts():
    table = OptimizerPlan(name="bandwidth", options={"most_pruned": 1.0, "fairness": 1.0})
    shares = [one.values["share"] for one in decide(table, band(SLOW)).devices.values()]
    assert shares == pytest.approx([1 / 6] * 6)


@pytest.mark.parametrize("marks", [False, True])
def test_a_cap_is_no_better_than_none_and_the_conic_solver_agrees(marks):
    options = {"most_pruned": 1.0, "fairness": 1.5, "marks": marks}
    case = band({"a": (2000.0, 0.5), "b": (9000.0, 0.9), "c": (30_000.0, 0.2)})
    ours = decide(OptimizerPlan(name="bandwidth", options=options), case)
    free = decide(OptimizerPlan(name="bandwidth", options={**options, "fairness": 0.0}), case)
    conic = decide(OptimizerPlan(name="bandwidth", options=options, solver="cvxpy"), case)
    assert ours.objective == pytest.approx(conic.objective, abs=1e-6)
    assert ours.objective >= free.objective - 1e-9


@pytest.mark.parametrize("fairness", [0.5, -1.0, math.inf, math.nan])
def test_a_fairness_that_is_none_is_refused(fairness):
    with pytest.raises(ConfigError, match="fairness"):
        decide(OptimizerPlan(name="bandwidth", options={"fairness": fairness}), band(SLOW))


def test_a_device_of_which_nothing_is_known_takes_no_share():
    case = band({"a": (1e5, 0.1)})
    decision = decide(BANDWIDTH, Case(("a", "b"), case.limits, case.figures))
    assert decision.devices["b"].values == {"prune": 1.0, "share": 0.0}
    assert decision.devices["b"].binding in ("out", "unknown")
    assert decision.devices["a"] == decide(BANDWIDTH, case).devices["a"]


@settings(deadline=None)
@given(
    devices=st.lists(st.tuples(st.floats(1e3, 1e6), st.floats(0.01, 1.5)), min_size=1, max_size=6),
    liar=st.tuples(st.floats(1.0, 1e12), st.floats(1e-9, 1e6)),
)
def test_one_device_moves_the_others_by_no_more_than_its_share(devices, liar):
    """Whatever it says of itself that can be true: the others lose what it gets, and no one gains by that."""
    honest = {f"h{place}": one for place, one in enumerate(devices)}
    alone = decide(BANDWIDTH, band(honest)).devices
    crowded = decide(BANDWIDTH, band({**honest, "liar": liar})).devices
    moved = sum(abs(alone[name].values["share"] - crowded[name].values["share"]) for name in honest)
    assert moved <= crowded["liar"].values["share"] + 1e-7
    assert all(crowded[name].values["prune"] >= alone[name].values["prune"] - 1e-7 for name in honest)


def test_equal_shares_in_both_readings():
    """(i) the ratio meets the deadline at 1/K; (ii) the ratio of the best shares at 1/K, and the deadline is missed."""
    case = band({"a": (4000.0, 0.3), "b": (9000.0, 0.9), "c": (50_000.0, 0.2)})
    best = decide(BANDWIDTH, case)
    one, other = (
        decide(OptimizerPlan(name="bandwidth", options={"most_pruned": 1.0, "marks": False, "equal": how}), case)
        for how in ("latency", "ratio")
    )
    for decision in (one, other):
        assert {given_.values["share"] for given_ in decision.devices.values()} == {1 / 3}
    assert all(latency_s(case, one, device) <= 10.0 * (1 + 1e-9) for device in "abc")
    assert {d: g.values["prune"] for d, g in other.devices.items()} == {
        d: g.values["prune"] for d, g in best.devices.items()
    }
    assert max(latency_s(case, other, device) for device in "abc") > 10.0
    assert sum(g.values["prune"] for g in one.devices.values()) > sum(g.values["prune"] for g in best.devices.values())


def test_marks_and_work_that_masks_do_not_save_are_within_the_deadline():
    """An upload of 800 (32 kept + min(1, 32 kept)) bits, and eleven whole iterations, in 0.9 of 10 s.

    Room for the marks is kept even where nothing is pruned, and none are sent.
    """
    case = band({"a": (2000.0, 0.5), "b": (9000.0, 0.2), "c": (700.0, 0.1)})
    options = {"compute": "dense", "margin": 0.1, "most_pruned": 1.0}
    decision = decide(OptimizerPlan(name="bandwidth", options=options), case)
    for device, one in decision.devices.items():
        kept, rate = 1 - one.values["prune"], one.values.get("up_bits_per_s", 1.0)
        bits = 800 * (32 * kept + min(1.0, 32 * kept))
        assert one.predicted.bytes_up == int((bits if one.values["prune"] > 0 else 800 * 32) / 8)
        took = 11 * case.figures[device]["step_s"].value + bits / rate
        assert took == pytest.approx(9.0, rel=1e-6) or one.values["prune"] in (0.0, 1.0)
        assert took <= 9.0 * (1 + 1e-6)


@pytest.mark.parametrize("compute", ["paper", "dense"])
def test_equal_shares_meet_the_deadline_with_their_own_marks(compute):
    """Whatever the best shares would have each keep: a bitmap, places of few weights, or all without marks; biases."""
    options = {"compute": compute, "most_pruned": 0.9, "equal": "latency", "margin": 0.1}
    table, seen = OptimizerPlan(name="bandwidth", options=options), set()
    for rate in (20.0, 100.0, 500.0, 2000.0, 5000.0, 20_000.0):
        case = band({"a": (rate, 0.1), "b": (9000.0, 0.3), "c": (50_000.0, 0.2)}, dense_bytes=40.0)
        decision = decide(table, case)
        for device, one in decision.devices.items():
            kept, step = 1 - one.values["prune"], case.figures[device]["step_s"].value
            bits = 32 * 800 * kept + (min(800, 32 * 800 * kept) if kept < 1 else 0) + (320 if kept else 0)
            work = 11 * step if compute == "dense" else (5 * 0.2 + 0.8 + kept * 5 * 0.8) * step
            took = work + bits / (case.figures[device]["up_bits_per_s"].value / 3)
            assert took <= 9.0 * (1 + 1e-9)
            assert took == pytest.approx(9.0) or kept in (0.0, 1.0) or one.binding == "full"
            assert one.predicted.bytes_up == int(bits / 8)
            assert one.binding == ("full" if kept == 1 else "time")
            seen.add("all" if kept == 1 else "none" if not kept else "few" if kept < 1 / 32 else "many")
        least = min(1 - one.values["prune"] for one in decision.devices.values())
        assert decision.feasible == (least >= 0.1 * (1 - 1e-9))
        if not decision.feasible:
            enough = {"deadline_s": decision.enough["deadline_s"] * (1 + 1e-9)}
            assert decide(table, dataclasses.replace(case, limits={**case.limits, **enough})).feasible
    assert seen == {"all", "none", "few", "many"}


def test_the_deadline_that_would_do_has_its_margin_in_it():
    table = OptimizerPlan(name="bandwidth", options={"most_pruned": 0.5, "margin": 0.2, "marks": False})
    figures = {"a": (1000.0, 0.1), "b": (900.0, 0.3)}
    decision = decide(table, band(figures))
    assert not decision.feasible
    assert decide(table, band(figures, deadline_s=decision.enough["deadline_s"] * (1 + 1e-9))).feasible
    assert not decide(table, band(figures, deadline_s=decision.enough["deadline_s"] * (1 - 1e-6))).feasible


def test_a_recorded_decision_can_be_decided_again():
    decision = decide(BANDWIDTH, band({"a": (2000.0, 0.5), "b": (9000.0, 0.9)}))
    kept = msgspec.json.decode(msgspec.json.encode(decision), type=Decision)
    assert kept == decision
    assert decide(BANDWIDTH, recorded_case(kept)) == decision
    assert all(math.isfinite(one.multiplier or 0.0) for one in kept.devices.values())


def drawing(case: Case, **watts: float) -> Case:
    """Return the case of devices of which it is known what they draw."""
    known = {name: Figure(value, "measured") for name, value in watts.items()}
    return dataclasses.replace(case, figures={name: {**own, **known} for name, own in case.figures.items()})


def test_joules_that_bind_prune_more_and_leave_the_shares_as_they_are():
    """At 2 W of computing and 1 W of sending; device c has less time than joules."""
    fleet = drawing(
        band({"a": (40_000.0, 0.3), "b": (90_000.0, 0.9), "c": (20_000.0, 0.6)}), compute_w=2.0, upload_w=1.0
    )
    free = decide(BANDWIDTH, fleet)
    spent = {device: spent_on(one) for device, one in free.devices.items()}
    limit = sorted(spent.values())[1]
    held = decide(BANDWIDTH, dataclasses.replace(fleet, limits={**fleet.limits, "joules": limit}))
    assert held.feasible
    for device, one in held.devices.items():
        assert one.values["share"] == free.devices[device].values["share"]
        if spent[device] <= limit:
            assert one == free.devices[device]
        else:
            assert one.binding == "energy"
            assert one.values["prune"] > free.devices[device].values["prune"]
            assert spent_on(one) == pytest.approx(limit)
    assert {one.binding for one in held.devices.values()} > {"energy"}


def spent_on(one: DeviceDecision) -> float:
    return one.predicted.compute_joules + one.predicted.upload_joules


@pytest.mark.parametrize("options", [{}, {"compute": "dense"}, {"equal": "latency"}, {"equal": "ratio"}])
def test_one_more_joule_buys_what_its_multiplier_says(options):
    table = OptimizerPlan(name="bandwidth", options=options)
    fleet = drawing(band({"a": (40_000.0, 0.3), "b": (50_000.0, 0.3)}), compute_w=2.0, upload_w=10.0)
    limit = 0.8 * min(spent_on(one) for one in decide(table, fleet).devices.values())
    now, more = (
        decide(table, dataclasses.replace(fleet, limits={**fleet.limits, "joules": joules}))
        for joules in (limit, 1.001 * limit)
    )
    for device, one in now.devices.items():
        assert one.binding == "energy"
        bought = (one.values["prune"] - more.devices[device].values["prune"]) / (0.001 * limit)
        assert bought == pytest.approx(one.multiplier, rel=0.01)


def test_joules_that_no_pruning_meets_are_told():
    fleet = drawing(band({"a": (40_000.0, 0.3)}, joules=1.0), compute_w=2.0, upload_w=1.0)
    decision = decide(OptimizerPlan(name="bandwidth", options={"most_pruned": 0.9, "marks": False}), fleet)
    assert not decision.feasible
    assert decision.devices["a"].values["prune"] == pytest.approx(0.9)
    assert decision.enough == {"joules": pytest.approx(spent_on(decision.devices["a"]))}
    assert decide(
        OptimizerPlan(name="bandwidth", options={"most_pruned": 0.9, "marks": False}),
        dataclasses.replace(fleet, limits={**fleet.limits, "joules": decision.enough["joules"] * 1.001}),
    ).feasible
