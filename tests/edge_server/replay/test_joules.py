"""Predicted joules equal charged joules; a budget lasts as planned."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from edge_server.allocation.explain import Explanation, explain
from edge_server.allocation.explanation_text import explanation_lines
from edge_server.journal.budget import Ledger
from edge_server.journal.costs import costs_by_round
from edge_server.journal.records import AnyRecord, Noted, RoundOpened, RunClosed, closed_rounds
from edge_server.replay.run import replay_plan
from edge_server.rounds.check_plan import load
from edge_server.trial.tables import total_joules
from shared.protocol.measurements import JOULES
from tests.edge_server.harness import write_examples, write_plan
from tests.naming import names_all

LINK = "{ kind = 'given', up_mbit_s = 0.05, down_mbit_s = 0.05 }"
POWER = "{ kind = 'given', busy_w = 5.0, idle_w = 2.5, tx_w = 3.0, rx_w = 3.0 }"
DEVICES = f"""
[[device]]
name = "pi"
count = 3
compute = {{ kind = "given", seconds = 4.0 }}
link = {LINK}
power = {POWER}
"""
"""77 kB in 12.3 s each way at 3 W, and 4 s of computing at 5 W: 94 J a task of the whole model."""


def played(
    folder: Path, joules: float, *, rounds: int = 10, devices: str = DEVICES, **sections: str
) -> list[AnyRecord]:
    text = {
        "algorithm": 'name = "fedspu"',
        "model": 'name = "mlp"\noptions = { features = 8, hidden = 1600, classes = 3 }',
        "data": write_examples(folder, 60),
        "partition": 'kind = "even"',
        "round": "deadline_s = 500.0",
        "optimizer": 'name = "keep_ratio"',
        "budget": f"joules = {joules}",
    }
    path = write_plan(folder, rounds=rounds, more=devices, **text | sections)
    return replay_plan(load(path, folder), folder / "run")[1]


def explained(records: list[AnyRecord]) -> list[Explanation]:
    return [explain(records, one.round) for one in records if isinstance(one, RoundOpened)]


def ledger_joules(records: list[AnyRecord]) -> float:
    ledger = Ledger()
    ledger.take(records)
    return ledger.spending().joules or 0.0


def test_a_budget_lasts_for_all_rounds_at_a_smaller_keep_and_predictions_come_true(tmp_path):
    """Of 1200 J for 30 tasks the whole model would take 94 J each."""
    records = played(tmp_path, 1200.0)
    assert len(closed_rounds(records)) == 10
    assert [one for one in records if isinstance(one, RunClosed)] == [RunClosed(outcome="finished")]
    assert ledger_joules(records) <= 1200.0
    for found in explained(records)[3:]:
        for one in found.devices:
            assert one.values["keep"] < 1.0
            assert one.binding == "energy"
            predicted, measured = (
                sum(getattr(cost, name) or 0.0 for name in JOULES) for cost in (one.predicted, one.measured)
            )
            assert measured == pytest.approx(predicted, rel=0.15)
            assert predicted <= found.limits["joules"]


def test_what_is_shown_explained_and_charged_is_one_sum(tmp_path):
    records = played(tmp_path, 360.0, rounds=3)
    costs = costs_by_round(records)
    shown = math.fsum(float(total_joules(costs[number]).rstrip("~≈")) for number in (1, 2, 3))
    assert ledger_joules(records) == pytest.approx(shown, rel=0.01)
    text = "\n".join(explanation_lines(explained(records)[2]))
    whole = sum(getattr(costs[3]["pi-0"], name) or 0.0 for name in JOULES)
    assert names_all(text, f"{whole:.4g}")


def test_before_its_first_task_a_device_draws_what_the_plan_says(tmp_path):
    """So round 1 keeps to the budget as well."""
    first = explained(played(tmp_path, 1200.0, rounds=10))[0]
    assert {one.figures["upload_w"].source for one in first.devices} == {"profile"}
    assert all(one.binding == "energy" for one in first.devices)


WHOLE = {
    "optimizer": 'name = "clusters"\noptions = { keep = "1" }',
    "model": 'name = "mlp"\noptions = { features = 8, hidden = 400, classes = 3 }',
}
"""19 kB in 3.1 s each way at 3 W, and 4 s at 5 W: 38.7 J a task, frames' headers included."""


@pytest.mark.parametrize(("left", "asked"), [(50.0, [3, 3, 1]), (90.0, [3, 3, 2]), (30.0, [3, 3])])
def test_a_round_that_cannot_be_afforded_is_begun_with_fewer_devices_or_not_at_all(tmp_path, left, asked):
    """Two rounds of three whole tasks, and what lasts for one task, for two, for none."""
    budget = 6 * 38.7 + left
    records = played(tmp_path, budget, **WHOLE)
    assert [len(one.assignments) for one in records if isinstance(one, RoundOpened)] == asked
    assert budget - 38.7 - 1.0 <= ledger_joules(records) <= budget
    notes = [one.what for one in records if isinstance(one, Noted)]
    assert len(notes) == len(asked[2:])
    assert all(names_all(note, "round 3", count, 3) for note, count in zip(notes, asked[2:], strict=True))
    [end] = [one for one in records if isinstance(one, RunClosed)]
    assert end.outcome == "stopped"
    assert re.search(rf"\bround {len(asked) + 1}\b.*\b38\.", end.cause)


SHARED = {
    "algorithm": 'name = "pruned_personalization"',
    "model": 'name = "cnn"\noptions = { side = 8, width = 4, hidden = 64 }',
    "codec": 'name = "masked"',
    "data": 'source = "digits"',
    "optimizer": 'name = "bandwidth"\noptions = { compute = "dense" }',
}


def test_bandwidth_keeps_a_budget_of_joules_and_shows_what_it_explains(tmp_path):
    """With nothing pruned it takes 32.3 J a task, 484 J in all."""
    records = played(tmp_path, 450.0, rounds=5, devices=DEVICES.replace("seconds = 4.0", "seconds = 2.0"), **SHARED)
    assert [one for one in records if isinstance(one, RunClosed)] == [RunClosed(outcome="finished")]
    assert ledger_joules(records) <= 450.0
    found = explained(records)
    assert [one.devices[0].binding for one in found] == ["full", "energy", "energy", "energy", "energy"]
    for one in found[2:]:
        assert one.feasible
        for device in one.devices:
            parts = [getattr(device.predicted, name) for name in ("download_joules", "compute_joules", "upload_joules")]
            assert sum(parts) == pytest.approx(one.limits["joules"])
            assert device.measured
            measured = [getattr(device.measured, name) or 0.0 for name in JOULES]
            assert sum(measured) == pytest.approx(sum(parts), rel=0.05)
            assert device.buys["joule"] > 0
