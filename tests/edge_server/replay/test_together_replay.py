"""Batched replay of a cohort: same record, same model but for rounding."""

from __future__ import annotations

import msgspec
import pytest

from edge_server.journal.records import Noted, UpdateAccepted, closed_rounds
from edge_server.journal.sqlite import read_records
from edge_server.plan.replay import ReplayPlan
from edge_server.replay import stacked_training
from edge_server.replay.run import plan_for_exact_bits, replay_name, replay_plan, run_replay
from tests.edge_server.harness import write_examples
from tests.edge_server.textbook import make_plan, require_equal
from tests.naming import names_all

FLEET = """
[[device]]
name = "quick"
count = 6
compute_s = 2.0
[[device]]
name = "slow"
count = 2
compute_s = 50.0
up_mbit_s = 0.1
"""
WITHIN = 1e-5


def planned(folder, **sections):
    """Return a plan of eight devices, two of them late, that all have parts of their own."""
    data = f"{write_examples(folder, 200)}\nholdout = 0.2"
    usual = {"round": "deadline_s = 20.0\nquorum = 0.7", "evaluation": "on_device = true", "cohort": "min_devices = 8"}
    return make_plan(folder, more=FLEET, **usual | {"data": data, "replay": "together = true"} | sections)


@pytest.mark.parametrize("algorithm", ['name = "fedavg"', 'name = "fedprox"'])
def test_a_cohort_trained_at_once_ends_at_the_same_model(tmp_path, algorithm):
    """Within rounding, and not bit for bit, so that it was at once; what takes virtual time is the same to the bit."""
    plan = planned(tmp_path, algorithm=algorithm)
    (fast, records), (exact, others) = (
        replay_plan(one, tmp_path / place / "run")
        for one, place in ((plan, "fast"), (plan_for_exact_bits(plan), "exact"))
    )
    for key, leaf in exact.tree.items():
        assert float((fast.tree[key] - leaf).abs().max()) <= WITHIN * float(leaf.abs().max()), key
    with pytest.raises(AssertionError):
        require_equal(fast.tree, exact.tree)
    costs, expected = (
        [one.update.cost for one in some if isinstance(one, UpdateAccepted)] for some in (records, others)
    )
    assert costs == expected
    assert [(one.arrived, one.seconds) for one in closed_rounds(records)] == [
        (one.arrived, one.seconds) for one in closed_rounds(others)
    ]


@pytest.mark.parametrize("workers", [1, 2])
def test_it_writes_the_same_bytes_for_any_number_of_processes(tmp_path, workers):
    """What is trained together follows from virtual time alone, late and superseded tasks included."""
    plan = planned(tmp_path)
    for place, several in (("one", 1), ("several", workers)):
        replay_plan(plan, tmp_path / place / "run", workers=several)
    one, several = ((tmp_path / place / "run" / "journal.jsonl").read_bytes() for place in ("one", "several"))
    assert one == several


def test_the_record_says_that_it_is_not_bit_for_bit(tmp_path):
    """And an exact one does not."""
    plan = planned(tmp_path)
    fast, exact = (
        {one.what for one in replay_plan(each, tmp_path / place / "run")[1] if isinstance(one, Noted)}
        for each, place in ((plan, "fast"), (plan_for_exact_bits(plan), "exact"))
    )
    [note] = fast - exact
    assert names_all(note, 2)
    assert not exact - fast


def test_what_cannot_be_done_together_is_done_alone(tmp_path):
    """A network that only one device fits in the cache with: the same bits as without the permission."""
    wide = 'name = "mlp"\noptions = { features = 8, hidden = 120000, classes = 3 }'
    plan = planned(tmp_path, model=wide, rounds=1, cohort="size = 2\nmin_devices = 8")
    assert stacked_training.divide_cohort(plan, 8, (8,)) == 1
    first, second = (
        replay_plan(plan, tmp_path / "a" / "run")[0],
        replay_plan(plan_for_exact_bits(plan), tmp_path / "b" / "run")[0],
    )
    require_equal(first.tree, second.tree)


def test_exactness_can_be_asked_for_on_the_command_line(tmp_path, monkeypatch):
    """`--exact` gives the record of a plan that allows nothing, under that plan's name."""
    plan = planned(tmp_path)
    path = tmp_path / "plan.toml"
    [(exact, _)] = run_replay(path, tmp_path, tmp_path / "runs", 0, 1, exact=True)
    [(fast, _)] = run_replay(path, tmp_path, tmp_path / "runs", 0, 1)
    assert (exact.name, fast.name) == (replay_name(plan_for_exact_bits(plan)), replay_name(plan))
    assert exact != fast
    assert msgspec.structs.replace(plan, replay=ReplayPlan()) == plan_for_exact_bits(plan)
    assert closed_rounds(read_records(exact))
