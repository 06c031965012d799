"""The largest ratio that fits: by hand, limit by limit."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_server.allocation.coordinator import decide
from edge_server.allocation.explain import find_margins
from edge_server.allocation.inputs import Case, recorded_case
from edge_server.journal.decision import Decision, Figure
from edge_server.plan.optimizer import OptimizerPlan

TABLE = OptimizerPlan(name="keep_ratio", options={"keep": "0.2,0.6,1"})
LADDER = ((0.2, 1000), (0.6, 5000), (1.0, 10_000))
"""At 8 kbit/s up, and no time down: 1, 5 and 10 s of upload."""


def ask(limits: dict[str, float] | None = None, **figures: float) -> Case:
    told = {"up_bits_per_s": 8000.0, "task_s": 3.0} | figures
    own = {name: Figure(value, "measured") for name, value in told.items()}
    return Case(("a",), {"deadline_s": 100.0, "model_bytes": 10_000.0} | (limits or {}), {"a": own}, LADDER)


def keep(case: Case) -> tuple[float, str]:
    one = decide(TABLE, case).devices["a"]
    return one.values["keep"], one.binding


def test_each_limit_binds_in_its_turn():
    """Of 3 s of work: (2 + p^2)/3 * 3 s + upload are 3.04, 7.36 and 13 s."""
    assert keep(ask()) == (1.0, "full")
    assert keep(ask({"deadline_s": 13.01})) == (1.0, "full")
    assert keep(ask({"deadline_s": 12.9})) == (0.6, "time")
    assert keep(ask({"deadline_s": 7.3})) == (0.2, "time")
    assert keep(ask({"joules": 7.0}, task_joules=8.0)) == (0.6, "energy")
    assert keep(ask(memory_bytes=20_000.0)) == (0.6, "memory")


def test_what_cannot_be_met_gives_the_least_a_flag_and_what_would_do():
    decision = decide(TABLE, ask({"deadline_s": 2.0}))
    assert decision.devices["a"].values == {"keep": 0.2}
    assert not decision.feasible
    assert decision.enough == {"deadline_s": pytest.approx(2.04 + 1.0)}
    assert decide(TABLE, ask({"deadline_s": 3.05})).feasible


def test_predictions_are_those_of_the_ratio():
    watts = {"upload_w": 2.0, "download_w": 3.0, "down_bits_per_s": 80_000.0}
    predicted = decide(TABLE, ask({"deadline_s": 8.0}, task_joules=30.0, **watts)).devices["a"].predicted
    assert predicted.compute_s == pytest.approx(2.36)
    assert predicted.upload_s == pytest.approx(5.0)
    assert (predicted.bytes_up, predicted.upload_joules) == (5000, pytest.approx(10.0))
    assert predicted.compute_joules == pytest.approx(23.6)
    assert predicted.download_joules == pytest.approx(1.5)


def test_all_joules_of_a_task_count():
    """Computing 8 J and 6.29 J; 10 s and 5 s of upload at 0.5 W, 1 s and 0.5 s of download at 1 W; then twice that."""
    watts = {"task_joules": 8.0, "upload_w": 0.5, "download_w": 1.0, "down_bits_per_s": 80_000.0}
    assert keep(ask({"joules": 14.0}, **watts)) == (1.0, "full")
    assert keep(ask({"joules": 13.9}, **watts)) == (0.6, "energy")
    assert keep(ask({"joules": 27.9}, joules_error=2.0, **watts)) == (0.6, "energy")
    assert keep(ask({"joules": 28.0}, joules_error=2.0, **watts)) == (1.0, "full")


def test_a_device_that_chose_once_and_for_all_is_decided_no_more():
    """What it keeps is what is predicted; whether that meets the limits is said."""
    roomy, tight = (ask({"deadline_s": seconds}, keep=0.6) for seconds in (100.0, 7.0))
    for case, fits in ((roomy, True), (tight, False)):
        decision = decide(TABLE, case)
        one = decision.devices["a"]
        assert (one.values, one.binding) == ({"keep": 0.6}, "settled")
        assert (one.predicted.compute_s, one.predicted.bytes_up) == (pytest.approx(2.36), 5000)
        assert decision.feasible == fits
    assert decision.enough == {"deadline_s": pytest.approx(7.36)}
    assert decide(TABLE, recorded_case(decision)).devices == decision.devices


def test_a_smaller_network_saves_more():
    smaller = OptimizerPlan(name="keep_ratio", options={"keep": "0.2,0.6,1", "curve": "smaller"})
    case = ask({"deadline_s": 6.2})
    assert decide(smaller, case).devices["a"].values == {"keep": 0.6}
    assert decide(TABLE, case).devices["a"].values == {"keep": 0.2}


def test_nobody_is_no_decision():
    assert decide(TABLE, Case((), {"deadline_s": 1.0, "model_bytes": 1.0}, ladder=LADDER)).devices == {}


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["up_bits_per_s", "task_s", "task_joules", "memory_bytes"]), st.floats()))
def test_one_devices_nonsense_is_its_own(nonsense):
    honest = ask().figures["a"]
    liar = {name: Figure(value, "measured") for name, value in nonsense.items()}
    case = Case(("a", "b"), ask().limits, {"a": honest, "b": liar}, LADDER)
    decision = decide(TABLE, case)
    assert decision.devices["a"] == decide(TABLE, ask()).devices["a"]
    assert 0.2 <= decision.devices["b"].values["keep"] <= 1.0


def test_one_more_unit_is_a_rung_or_nothing():
    decision = decide(TABLE, ask({"deadline_s": 12.5}, f_hertz=1e6))
    bought = find_margins(TABLE, decision, ["a"])["a"]
    assert bought["second"] == pytest.approx(0.4)
    assert bought["megahertz"] == pytest.approx(0.4)
    assert bought["megabit_per_s"] == pytest.approx(0.4)
    assert isinstance(decision, Decision)
    assert decide(TABLE, recorded_case(decision)) == decision
    assert all(math.isfinite(value) for value in bought.values())
