"""HCEF on one site, live and replayed, within its budgets."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest

from edge_server.allocation.explain import explain
from edge_server.allocation.explanation_text import explanation_lines
from edge_server.journal.budget import Ledger
from edge_server.journal.costs import costs_by_round
from edge_server.journal.records import AnyRecord, RoundOpened, RunClosed, UpdateAccepted, closed_rounds
from edge_server.plan.plan import Plan
from edge_server.replay.run import replay_plan
from edge_server.replay.source import find_source
from edge_server.replay.trace.transfer import export
from tests.edge_server.fleets import Site
from tests.edge_server.textbook import NAMES, ROUNDS, make_plan, require_equal
from tests.naming import names_all

numbers = itertools.count()
LARGE = 'name = "mlp"\noptions = { features = 8, hidden = 1024, classes = 3 }'
WEIGHTS = 8 * 1024 + 1024 + 3 * 1024 + 3
CLOCKS_GHZ, RATES_MBIT_S, WATTS = (1.0, 1.5, 2.0), (0.1, 0.05, 0.2), (0.5, 1.0, 0.1)


def device(name: str, place: int) -> str:
    """A step takes 1 / f s and f^2 J at f GHz; sending takes as long as the bytes need, at so many watts."""
    return f"""
[[device]]
name = "{name}"
compute = {{ kind = "ranges", hertz = {CLOCKS_GHZ[place] * 1e9}, cycles_per_step = 1e9 }}
link = {{ kind = "given", up_mbit_s = {RATES_MBIT_S[place]} }}
power = {{ kind = "cycles", kappa = 1e-27, tx_w = {WATTS[place]} }}
"""


FLEET = "".join(device(name, place) for place, name in enumerate(NAMES))


def make(folder: Path, optimizer: str = "", *, gradients: int = 3, rounds: int = ROUNDS, **sections: str) -> Plan:
    """Return a plan of five local steps; what decides is given by its options."""
    chosen = {
        "algorithm": f'name = "hcef"\noptions = {{ local_steps = 5, gradients = {gradients} }}',
        "codec": 'name = "topk"',
        "round": "deadline_s = 900.0",
        "optimizer": f'name = "hcef"\noptions = {{ {optimizer} }}',
    }
    return make_plan(folder, rounds, **(chosen | sections))


def openings(records: list[AnyRecord]) -> list[RoundOpened]:
    return [one for one in records if isinstance(one, RoundOpened)]


def updates(records: list[AnyRecord]) -> list[UpdateAccepted]:
    return [one for one in records if isinstance(one, UpdateAccepted)]


def told(records: list[AnyRecord]) -> list[dict]:
    """Return what every device was told, and what it told of its gradients, round by round."""
    rounds = [{name: one.values for name, one in opened.assignments.items()} for opened in openings(records)]
    moments = sorted((one.round, one.device, sorted(one.update.metrics.items())) for one in updates(records))
    return [*rounds, moments]


def ledger_joules(records: list[AnyRecord]) -> float:
    ledger = Ledger()
    ledger.take(records)
    return ledger.spending().joules or 0.0


def test_live_and_replayed_it_comes_to_the_same_bits(network, tmp_path):
    """Where time and joules do not bind, all follows from what devices tell of their gradients."""
    plan = make(tmp_path)
    here = Site(network, plan, tmp_path / "live", name=f"hcef{next(numbers)}")
    state, records = here.play()
    again, others = replay_plan(plan, tmp_path / "replayed" / "run")
    require_equal(state.tree, again.tree)
    assert told(records) == told(others)
    steps = [one.values["steps"] for opened in openings(records) for one in opened.assignments.values()]
    assert steps[:3] == pytest.approx([5 / 6] * 3)  # before anything is known of gradients
    assert all(step < 5 / 6 for step in steps[3:])


@pytest.mark.parametrize("baseline", ["hcef", "cef", "cef_f", "cef_c", "mll_sgd"])
def test_seconds_and_joules_are_those_of_the_paper(tmp_path, baseline):
    """(8) and (9) by the steps that were really taken and the bytes that were really sent, in every round."""
    sections = {"model": LARGE, "more": FLEET, "measure": "seconds = 1.0"}
    plan = make(tmp_path, f'baseline = "{baseline}", deadline_s = 12.0', **sections)
    _, records = replay_plan(plan, tmp_path / "run")
    costs, joules = costs_by_round(records), 0.0
    for closed in closed_rounds(records):
        seconds = []
        for place, name in enumerate(NAMES):
            [update] = [one.update for one in updates(records) if (one.round, one.device) == (closed.round, name)]
            steps = update.metrics["steps_taken"] + 3
            upload_s = 8 * update.params.size / (RATES_MBIT_S[place] * 1e6)
            cost = costs[closed.round][name]
            assert cost.compute_s == pytest.approx(steps / CLOCKS_GHZ[place])
            assert cost.compute_joules == pytest.approx(steps * CLOCKS_GHZ[place] ** 2)
            assert cost.upload_s == pytest.approx(upload_s, rel=0.05)
            seconds.append(cost.compute_s + cost.upload_s)
            joules += cost.compute_joules + cost.upload_s * WATTS[place]
        assert closed.seconds == pytest.approx(max(seconds), rel=0.03)  # and the offer
    assert ledger_joules(records) == pytest.approx(joules, rel=1e-6)


def test_budgets_of_six_tenths_last_for_all_rounds(tmp_path):
    """Of what CEF takes; CEF itself is out of them before its last round. To what chance adds in a round."""
    sections = {"model": LARGE, "more": FLEET, "measure": "seconds = 1.0"}
    (folder := tmp_path / "cef").mkdir()
    plan = make(folder, 'baseline = "cef"', gradients=0, rounds=8, **sections)
    _, records = replay_plan(plan, folder / "run")
    seconds, joules = math.fsum(one.seconds for one in closed_rounds(records)), ledger_joules(records)
    sections["budget"] = f"time_s = {0.6 * seconds}\njoules = {0.6 * joules}"
    ends = {}
    for baseline in ("hcef", "cef_f", "cef"):
        (folder := tmp_path / f"{baseline}-budget").mkdir()
        plan = make(folder, f'baseline = "{baseline}"', gradients=0 if baseline == "cef" else 2, rounds=8, **sections)
        _, ends[baseline] = replay_plan(plan, folder / "run")
    assert len(closed_rounds(ends["cef"])) < 8
    assert len(closed_rounds(ends["hcef"])) == 8
    assert math.fsum(one.seconds for one in closed_rounds(ends["hcef"])) <= 0.7 * seconds
    assert ledger_joules(ends["hcef"]) <= 0.6 * joules * 1.05
    decisions = [one.decision for one in openings(ends["cef"])]
    assert not decisions[-1].feasible
    assert decisions[-1].enough


def test_budgets_below_the_floors_end_no_run_with_an_exception(tmp_path):
    """Floors are given and flagged; the run ends where its budget is spent, and says what would have done."""
    sections = {"model": LARGE, "more": FLEET, "measure": "seconds = 1.0", "budget": "time_s = 9.0\njoules = 20.0"}
    _, records = replay_plan(make(tmp_path, **sections), tmp_path / "run")
    [end] = [one for one in records if isinstance(one, RunClosed)]
    assert end.outcome in ("stopped", "finished")
    first = openings(records)[0].decision
    assert not first.feasible
    assert first.enough.keys() >= {"deadline_s", "budget.time_s"}
    assert all(one.values["steps"] == pytest.approx(0.05) for one in first.devices.values())


def test_a_round_is_explained(tmp_path):
    """Figures, what bound, predicted and measured."""
    sections = {"model": LARGE, "more": FLEET, "measure": "seconds = 1.0"}
    _, records = replay_plan(make(tmp_path, "deadline_s = 8.0", **sections), tmp_path / "run")
    found = explain(records, 2)
    text = "\n".join(explanation_lines(found))
    assert names_all(text, 2, "hcef", "8 s", "(15a)")
    assert found.devices[0].figures["step_s"].value == pytest.approx(1.0)


def test_the_record_is_the_same_for_any_number_of_processes_and_its_trace_is_the_run_again(tmp_path):
    sections = {"model": LARGE, "more": FLEET, "measure": "seconds = 1.0"}
    plan = make(tmp_path, "deadline_s = 9.0", **sections)
    _, records = replay_plan(plan, tmp_path / "runs" / "run")
    assert replay_plan(plan, tmp_path / "others" / "run", workers=3)[1] == records
    export(tmp_path / "runs", "run", tmp_path / "trace", tmp_path)
    again, trace = find_source(tmp_path / "trace", None, tmp_path / "runs", tmp_path)
    _, repeated = replay_plan(again, tmp_path / "more" / "run", trace=trace)
    spent = [
        [cost.compute_s for costs in costs_by_round(one).values() for cost in costs.values()]
        for one in (records, repeated)
    ]
    assert spent[1] == pytest.approx(spent[0])
