"""Single-device what-if equals deciding again for each device."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from edge_server.allocation.coordinator import convert_options, decide, find_allocator
from edge_server.allocation.inputs import Case
from edge_server.journal.decision import Figure, keep_ratio
from edge_server.plan.optimizer import OptimizerPlan
from tests.edge_server.allocation.test_decisions import band

LADDER = ((0.2, 8_000), (0.4, 20_000), (0.6, 36_000), (0.8, 56_000), (1.0, 80_000))


def fleet(count: int, seed: int) -> Case:
    """Return devices whose links and clocks differ; of the uplink there is far too little, or nearly enough."""
    rng = np.random.default_rng([count, seed])
    room = 10 ** rng.uniform(-1.2, 0.0)
    rates = room * count * 10 ** rng.uniform(3.0, 4.5, count)
    return band({f"d{place}": (float(rate), float(rng.uniform(0.05, 0.8))) for place, rate in enumerate(rates)})


def kept_alone(table: OptimizerPlan, case: Case, changed: Case) -> dict[str, float]:
    return find_allocator(table).what_if.keep_ratios(convert_options(table), case, changed)


def with_figures(case: Case, factor: float, name: str, devices: list[str]) -> Case:
    """Return the case with one figure of some devices times a factor."""
    figures = dict(case.figures)
    for device in devices:
        told = figures[device][name]
        figures[device] = {**figures[device], name: Figure(factor * told.value, told.source)}
    return dataclasses.replace(case, figures=figures)


def one_by_one(table: OptimizerPlan, case: Case, factor: float, name: str) -> list[float]:
    changed = {device: decide(table, with_figures(case, factor, name, [device])) for device in case.names}
    return [keep_ratio(decision.devices[device].values) for device, decision in changed.items()]


@pytest.mark.parametrize("most_pruned", [1.0, 0.9])
@pytest.mark.parametrize("compute", ["paper", "dense"])
@pytest.mark.parametrize("equal", ["", "latency", "ratio"])
def test_the_rest_of_the_fleet_answers(compute, most_pruned, equal):
    """Exactly, where marks count for nothing: with floors, with steps in place of ramps, for equal shares."""
    options = {"compute": compute, "most_pruned": most_pruned, "equal": equal, "marks": False}
    table, moved = OptimizerPlan(name="bandwidth", options=options), 0
    for seed in range(8):
        case = fleet((1, 2, 5, 12)[seed % 4], seed)
        for name, factor in (("up_bits_per_s", 1.01), ("step_s", 1 / 1.01), ("up_bits_per_s", 2.0)):
            found = kept_alone(table, case, with_figures(case, factor, name, case.names))
            expected = one_by_one(table, case, factor, name)
            assert [found[device] for device in case.names] == pytest.approx(expected, rel=1e-7, abs=1e-9)
            before = [keep_ratio(one.values) for one in decide(table, case).devices.values()]
            moved += sum(abs(now - then) > 1e-9 for now, then in zip(expected, before, strict=True))
    assert moved > 15


@pytest.mark.parametrize("compute", ["paper", "dense"])
def test_few_devices_are_decided_for_once_more_with_the_marks_of_all(compute):
    table = OptimizerPlan(name="bandwidth", options={"compute": compute, "most_pruned": 0.9})
    for seed in range(4):
        case = fleet(8, seed)
        found = kept_alone(table, case, with_figures(case, 1.01, "up_bits_per_s", case.names))
        expected = one_by_one(table, case, 1.01, "up_bits_per_s")
        assert [found[device] for device in case.names] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("compute", ["paper", "dense"])
def test_of_many_devices_a_devices_own_marks_follow_what_it_keeps(compute):
    """Those of the others stay: for most of whom a hundredth more moves, it is what deciding once more finds."""
    table = OptimizerPlan(name="bandwidth", options={"compute": compute, "most_pruned": 0.9})
    case, more = fleet(40, 1), []
    decision = decide(table, case)
    before = kept_alone(table, case, case)
    assert before == pytest.approx({name: keep_ratio(one.values) for name, one in decision.devices.items()}, abs=1e-6)
    found = kept_alone(table, case, with_figures(case, 1.01, "up_bits_per_s", case.names))
    for name, now in zip(case.names, one_by_one(table, case, 1.01, "up_bits_per_s"), strict=True):
        if abs(now - before[name]) > 1e-6:
            more.append((found[name] - before[name]) / (now - before[name]))
    assert len(more) > 0
    assert np.median(more) == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("slow", [700.0, 300.0])
def test_a_floor_that_did_not_fit_may_fit_with_a_better_link(slow):
    """Of 10 s minus 1.1 s of steps, an upload of 0.1 * 25,600 bits takes 0.29 of the uplink at 1 kbit/s: that of `slow`
    does not fit beside those of `a` and `b`, and with twice the link it does, or still does not."""
    table = OptimizerPlan(name="bandwidth", options={"compute": "dense", "most_pruned": 0.9, "marks": False})
    case = band({"a": (1000.0, 0.1), "b": (1000.0, 0.1), "slow": (slow / 2, 0.1), "other": (slow / 4, 0.1)})
    assert decide(table, case).devices["slow"].values["prune"] == 1.0
    found = kept_alone(table, case, with_figures(case, 2.0, "up_bits_per_s", case.names))
    expected = one_by_one(table, case, 2.0, "up_bits_per_s")
    assert [found[device] for device in case.names] == pytest.approx(expected)
    assert found["slow"] == pytest.approx(0.1 if slow == 700.0 else 0.0)


def test_devices_with_their_own_limits_answer_alone():
    figures = {
        name: {"task_s": Figure(seconds, "measured"), "up_bits_per_s": Figure(1e5, "measured")}
        for name, seconds in (("a", 4.0), ("b", 9.0), ("c", 30.0))
    }
    case = Case(("a", "b", "c"), {"deadline_s": 12.0, "model_bytes": 80_000.0}, figures, LADDER)
    table = OptimizerPlan(name="keep_ratio")
    expected = one_by_one(table, case, 0.7, "task_s")
    found = kept_alone(table, case, with_figures(case, 0.7, "task_s", case.names))
    assert [found[device] for device in case.names] == expected
    assert expected != [keep_ratio(one.values) for one in decide(table, case).devices.values()]


def test_nobody_and_whoever_takes_no_part():
    table = OptimizerPlan(name="bandwidth")
    nobody = Case((), band({}).limits)
    assert kept_alone(table, nobody, nobody) == {}
    case = fleet(3, 0)
    case = dataclasses.replace(case, devices=(*case.devices, "stranger"))
    found = kept_alone(table, case, with_figures(case, 1.01, "up_bits_per_s", ["d0", "d1", "d2"]))
    assert found["stranger"] == 0.0
    assert all(math.isfinite(one) for one in found.values())
