"""The study of FedSL: one factor at a time, each run as many steps as the others; a small cell of it runs."""

from __future__ import annotations

import msgspec
import pytest

from edge_server.plan.evaluation import EvaluationPlan
from edge_server.plan.sections import Chosen
from edge_server.replay.study.grid import Cell
from tests.edge_server.replay.study.shipped import grid, run
from tests.machine import shared


def test_every_cell_does_as_many_steps_and_is_evaluated_after_the_same_ones():
    found = grid("fedsl")
    assert len(found) == 14 * 3
    period = {cell.name: cell.plan.algorithm.options["period"] for cell in found}
    assert {cell.plan.rounds * period[cell.name] for cell in found} == {320}
    assert {cell.plan.evaluation.every * period[cell.name] for cell in found} == {20}
    assert {cell.plan.seed for cell in found} == {1, 2, 3}


def test_one_factor_changes_at_a_time():
    """Of the first five against the traditional method; and period-5 is the middle cut at p = 0.3."""
    options = {cell.variant: cell.plan.algorithm.options for cell in grid("fedsl")}
    plain = options["traditional"]
    for variant in ("sparsity-35", "sparsity-70", "bits-8", "bits-4"):
        assert len(options[variant].items() - plain.items()) == 1, variant
    for variant in ("shallow-drop-30", "deep-drop-30"):
        assert {name for name, _ in options[variant].items() - options["period-5"].items()} == {"cut"}, variant
    for variant in ("shallow-drop-0", "shallow-drop-70"):
        assert {name for name, _ in options[variant].items() - options["shallow-drop-30"].items()} == {"drop"}, variant


def smaller(cell: Cell, **changes: object) -> Cell:
    """Return a cell that ends soon."""
    plan = msgspec.structs.replace(
        cell.plan,
        rounds=1,
        evaluation=EvaluationPlan(every=1),
        data=msgspec.structs.replace(cell.plan.data, path=str(shared("data") / cell.plan.data.path), limit=80),
    )
    return msgspec.structs.replace(cell, plan=msgspec.structs.replace(plan, **changes))


@pytest.mark.parametrize("variant", ["deep-drop-70"])
def test_a_small_cell_of_it_runs(tmp_path, variant):
    """On a few of the real images, its width halved; what it exchanged is told apart from the model."""
    cell = next(one for one in grid("fedsl") if one.variant == variant)
    small = smaller(cell, model=Chosen(name="vgg13", options={"width": 0.0625}))
    _, result = run(small, tmp_path)
    [one] = result.digest.rounds
    assert one.arrived == 5
    assert one.accuracy is not None
    columns = 4 * 5 * 5 * 16 * 0.3 * 32 * 2 * 2  # bytes, devices, steps, examples, share kept, features
    assert one.features_bytes.value == pytest.approx(columns, rel=0.3)
    assert one.until.bytes.value > one.until.bytes_up.value + one.until.bytes_down.value
