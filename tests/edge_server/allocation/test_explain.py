"""Why a device got what it got: derivatives against differences, and what people and programs are shown."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest

from edge_server.allocation.coordinator import decide
from edge_server.allocation.explain import Explanation, explain
from edge_server.allocation.explanation_text import explanation_lines
from edge_server.allocation.inputs import Case
from edge_server.journal.decision import Figure, keep_ratio
from edge_server.journal.records import AnyRecord, CostSettled, RoundClosed, RoundOpened, RunOpened
from edge_server.plan.optimizer import OptimizerPlan
from edge_server.rounds.check_plan import load
from shared.errors import ConfigError
from shared.protocol.measurements import Cost
from shared.protocol.messages import Assignment, Hyper
from shared.runtime.clock import monotonic
from tests.edge_server.allocation.test_decisions import BANDWIDTH, band
from tests.edge_server.harness import write_plan
from tests.naming import names_all, naming


def with_clocks(case: Case) -> Case:
    """Return the case of devices that tell a clock of 1 GHz."""
    clock = {"f_hertz": Figure(1e9, "measured")}
    return dataclasses.replace(case, figures={name: {**own, **clock} for name, own in case.figures.items()})


CASE = band({"a": (4000.0, 0.3), "b": (9000.0, 0.9), "c": (50_000.0, 0.2)})


def journal(folder, table: OptimizerPlan = BANDWIDTH, case: Case = CASE) -> list[AnyRecord]:
    plan = msgspec.structs.replace(load(write_plan(folder), folder), optimizer=table)
    told = {device: Assignment(seed=0, hyper=Hyper()) for device in case.names}
    return [
        RunOpened(run="r", plan=plan),
        RoundOpened(round=1, assignments=told, decision=decide(table, case)),
        CostSettled(round=1, device="a", cost=Cost(compute_s=2.0, upload_s=9.0, bytes_up=1234)),
        RoundClosed(round=1, outcome="aggregated", arrived=("a",), seconds=11.5),
    ]


def test_what_more_would_buy_is_the_multiplier(tmp_path):
    """One more second, by deciding once more with a hundredth more of it, and by the optimizer's own derivative."""
    found = explain(journal(tmp_path), 1)
    total = sum(one.buys["second"] for one in found.devices)
    told = sum(one.multiplier or 0.0 for one in found.devices)
    assert total > 0
    assert total == pytest.approx(told, rel=0.1)
    assert all(one.buys["megabit_per_s"] >= -1e-9 for one in found.devices)
    assert found.seconds == 11.5
    assert [one.device for one in found.devices] == ["a", "b", "c"]


def test_what_its_own_link_and_clock_would_buy_is_found_by_deciding_again(tmp_path):
    """A hundredth more of each, of one device after the other; per Mbit/s and per MHz."""
    case = with_clocks(band({"a": (4000.0, 0.3), "b": (9000.0, 0.9), "c": (5000.0, 0.2)}))
    found, helps = explain(journal(tmp_path, case=case), 1), 0
    for one in found.devices:
        figures = case.figures[one.device]
        for what, figure, factor, amount in (
            ("megabit_per_s", "up_bits_per_s", 1.01, 0.01 * figures["up_bits_per_s"].value / 1e6),
            ("megahertz", "step_s", 1 / 1.01, 0.01 * figures["f_hertz"].value / 1e6),
        ):
            own = {**figures, figure: Figure(factor * figures[figure].value, "measured")}
            again = decide(BANDWIDTH, dataclasses.replace(case, figures={**case.figures, one.device: own}))
            more = keep_ratio(again.devices[one.device].values) - keep_ratio(one.values)
            assert one.buys[what] == pytest.approx(more / amount, rel=1e-6, abs=1e-9)
            helps += more > 1e-6
    assert helps > 2


@pytest.mark.parametrize("compute", ["paper", "dense"])
def test_a_large_fleet_is_explained_at_once(tmp_path, compute):
    """Two thousand devices in seconds: deciding once more for every device would take minutes."""
    rng, count = np.random.default_rng(1), 2000
    rates = count * 10 ** rng.uniform(2.5, 4.0, count)
    fleet = {f"d{place:04}": (float(rate), float(rng.uniform(0.05, 0.4))) for place, rate in enumerate(rates)}
    table = OptimizerPlan(name="bandwidth", options={"compute": compute})
    records = journal(tmp_path, table, with_clocks(band(fleet, dense_bytes=40.0)))
    began = monotonic()
    found = explain(records, 1)
    assert monotonic() - began < 60
    assert sum(one.buys["megabit_per_s"] > 1e-6 for one in found.devices) >= 1
    assert all(one.buys.keys() == {"second", "megahertz", "megabit_per_s"} for one in found.devices)


def test_lines_tell_the_sources_the_binding_limit_and_predicted_against_measured(tmp_path):
    text = "\n".join(explanation_lines(explain(journal(tmp_path), 1)))
    for figures in (("10 s",), ("11 s", "a", "1.10"), ("11.5 s",), ("300 ms",), ("upload", 9)):
        assert any(names_all(line, *figures) for line in text.splitlines()), figures


def test_fairness_is_named_where_it_binds(tmp_path):
    """By its limit of the round, and at the device that it holds back."""
    table = OptimizerPlan(name="bandwidth", options={"fairness": 1.0})
    case = dataclasses.replace(CASE, limits=CASE.limits | {"most_share": 1 / 3})
    text = "\n".join(explanation_lines(explain(journal(tmp_path, table, case), 1)))
    assert names_all(text, "33.3 %", "fairness")


def test_it_is_json_and_may_be_of_one_device(tmp_path):
    found = explain(journal(tmp_path), 1, "b")
    assert [one.device for one in found.devices] == ["b"]
    assert msgspec.json.decode(msgspec.json.encode(found), type=Explanation) == found


def test_clusters_measure_nothing(tmp_path):
    table = OptimizerPlan(name="clusters")
    records = journal(tmp_path, BANDWIDTH)
    plan = msgspec.structs.replace(records[0].plan, optimizer=table)
    decision = decide(table, dataclasses.replace(CASE, places={"a": 0, "b": 1, "c": 2}))
    records[:2] = [RunOpened(run="r", plan=plan), msgspec.structs.replace(records[1], decision=decision)]
    explanation = explain(records, 1)
    assert {one.binding for one in explanation.devices} == {"cluster"}
    assert {line.partition(":")[0] for line in explanation_lines(explanation)} >= {"a", "b", "c"}


@pytest.mark.parametrize(("joules", "said"), [({"task_joules": Figure(2.0, "measured")}, False), ({}, True)])
def test_whose_joules_nobody_knows_is_told(tmp_path, joules, said):
    table = OptimizerPlan(name="keep_ratio", options={"joules": 5.0})
    figures = {"a": {"task_s": Figure(1.0, "measured"), "up_bits_per_s": Figure(1e6, "measured"), **joules}}
    limits = {"deadline_s": 9.0, "joules": 5.0, "weights": 10.0, "model_bytes": 40.0}
    case = Case(("a",), limits, figures, ((0.5, 20), (1.0, 40)))
    explanation = explain(journal(tmp_path, table, case), 1)
    del limits["joules"]
    unlimited = msgspec.structs.replace(explanation, limits=limits)
    lines, without_limit = list(explanation_lines(explanation)), list(explanation_lines(unlimited))
    assert len(lines) - len(without_limit) == said, "one line more, where there is such a limit"


@pytest.mark.parametrize(("number", "device", "says"), [(7, "", "7"), (1, "x", "x")])
def test_what_is_not_there_is_said(tmp_path, number, device, says):
    with pytest.raises(ConfigError, match=naming(says)):
        explain(journal(tmp_path), number, device)


def test_a_round_without_a_decision_is_said(tmp_path):
    records = journal(tmp_path)
    records[1] = msgspec.structs.replace(records[1], decision=None)
    with pytest.raises(ConfigError, match=naming("round 1")):
        explain(records, 1)
    records[0] = msgspec.structs.replace(records[0], plan=msgspec.structs.replace(records[0].plan, optimizer=None))
    with pytest.raises(ConfigError, match=naming("round 1", "[optimizer]")):
        explain(records, 1)
