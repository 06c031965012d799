"""Replay of a split run: same bits for any number of processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from edge_server.journal.costs import costs_by_round
from edge_server.journal.records import closed_rounds
from edge_server.plan.plan import Plan
from edge_server.replay.run import replay_plan
from shared.models.cost import step_flops
from shared.protocol.messages import Spec
from tests.edge_server.textbook import NAMES, ROUNDS, SLOW, alone, make_plan, require_equal

pytestmark = pytest.mark.usefixtures("plain_split")

STEPS = 4
SPLIT = {
    "algorithm": f'name = "plain-split"\noptions = {{ steps = {STEPS} }}',
    "hyper": "batch_size = 8\nlearning_rate = 0.2",
}


def slow(folder: Path, **sections: str) -> Plan:
    """Return a plan of devices with links so slow that offers are repeated."""
    return make_plan(
        folder, more=SLOW, **(SPLIT | {"round": "deadline_s = 3600.0\nstep_deadline_s = 600.0"} | sections)
    )


def test_a_replay_is_what_one_process_computes_alone_whatever_the_links(tmp_path):
    """Sessions take turns in virtual time, and none leaves a trace in another."""
    plan = slow(tmp_path)
    state, records = replay_plan(plan, tmp_path / "run")
    require_equal(state.tree, alone(plan))
    assert [(one.arrived, one.steps, one.missed) for one in closed_rounds(records)] == ROUNDS * [(NAMES, STEPS, {})]


def test_the_record_is_the_same_for_any_number_of_processes_also_where_steps_are_missed(tmp_path):
    plan = slow(tmp_path, round="deadline_s = 3600.0\nstep_deadline_s = 12.0")
    for place, workers in (("one", 1), ("several", 3)):
        _, records = replay_plan(plan, tmp_path / place / "run", workers=workers)
    one, several = ((tmp_path / place / "run" / "journal.jsonl").read_bytes() for place in ("one", "several"))
    assert one == several
    rounds = closed_rounds(records)
    assert all(closed.missed["b"] for closed in rounds), "its link is slower than a step may take"
    assert all("c" not in closed.missed and closed.steps == STEPS for closed in rounds)


def test_a_session_costs_its_device_the_part_below_the_cut_and_the_exchange_the_links_seconds(tmp_path):
    """A device alone, 1 Mbit/s up and 4 down: its compute_s are the plan's, the rest of a step is bytes over rate."""
    device = '[[device]]\nname = "a"\ncompute_s = 2.0\nup_mbit_s = 1.0\ndown_mbit_s = 4.0'
    plan = make_plan(tmp_path, rounds=1, more=device, cohort="min_devices = 1", **SPLIT)
    cost = costs_by_round(replay_plan(plan, tmp_path / "run")[1])[1]["a"]
    assert cost.compute_s == pytest.approx(2.0)
    assert cost.features_bytes > STEPS * 8 * 64 * 4, "features of 8 examples and 64 units, as floats"
    assert cost.gradient_bytes > STEPS * 8 * 64 * 4
    least_s = 8 * (cost.features_bytes / 1e6 + cost.gradient_bytes / 4e6)
    assert least_s < cost.exchange_s < 1.4 * least_s, "besides the frames, headers and requests"


def test_work_below_the_cut_is_counted_from_its_shapes():
    """8, 64 and 3 units, cut before the last layer: forward 2 B 8 64, backward as much, since the inputs need none."""
    spec = Spec(name="mlp", options={"features": 8, "hidden": 64, "classes": 3})
    example = torch.Size([8])
    assert step_flops(spec, example, 10, below=3, trains=False) == 2 * 10 * 8 * 64
    assert step_flops(spec, example, 10, below=3) == 2 * 2 * 10 * 8 * 64
