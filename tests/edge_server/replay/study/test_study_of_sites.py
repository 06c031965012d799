"""Cells of several sites: a run of each in its folder, their mean accuracy, the last seconds, all joules."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest

from edge_server.journal.records import CostSettled, RoundClosed, RoundOpened, RunClosed, RunOpened, closed_rounds
from edge_server.journal.sqlite import read_records
from edge_server.plan.plan import Plan
from edge_server.record.amounts import amount_or_unknown
from edge_server.replay.study.cell import run_cell
from edge_server.replay.study.grid import Cell
from edge_server.replay.study.pool import Tell
from edge_server.replay.study.result import RESULT, CellEnded, Order, make_order, read_result
from edge_server.replay.study.run import complete_study
from edge_server.replay.study.sites import digest_cell, merge_digests
from edge_server.report.digest import Digest
from edge_server.report.summarise import digest_run
from edge_server.report.targets import best_value
from shared.errors import ConfigError
from shared.protocol.measurements import Cost
from shared.protocol.messages import Assignment, Hyper
from tests.edge_server.fleets import HEAD, TWO_SEEDS, grid_of
from tests.naming import naming

SITES = """
[[variant]]
name = "sites"
set.cohort.min_devices = 1
set.sites = { clusters = { roof = ["a", "b"], barn = ["c"] }, edge_rounds = 2 }
"""


def in_this_process(orders: Sequence[Order], place: Path, tell: Tell) -> None:
    """Run cells one after another."""
    for order in orders:
        run_cell(order)
        tell(CellEnded(order.cell, ""))


@pytest.fixture
def cells(tmp_path: Path) -> list[Cell]:
    return grid_of(tmp_path, f"{HEAD}{TWO_SEEDS}{SITES}")[1]


def site_digest(plan: Plan, accuracies: Sequence[float | None], seconds: Sequence[float], joules: float) -> Digest:
    """Return what a site came to whose rounds took this, each of them all the joules that a device told."""
    records = [RunOpened(run="run", plan=plan)]
    for number, (accuracy, taken) in enumerate(zip(accuracies, seconds, strict=True), 1):
        records += [
            RoundOpened(round=number, assignments={"a": Assignment(seed=0, hyper=Hyper())}),
            CostSettled(
                round=number, device="a", cost=Cost(download_joules=0.0, compute_joules=joules, upload_joules=0.0)
            ),
            RoundClosed(round=number, outcome="aggregated", arrived=("a",), accuracy=accuracy, seconds=taken),
        ]
    return digest_run([*records, RunClosed(outcome="finished")])


def test_sites_together_take_the_mean_the_last_and_the_sum(cells):
    """A round that one site alone tested has no accuracy, one that a site has not ended does not count."""
    plan = cells[0].plan
    found = merge_digests(
        "cell",
        plan,
        {
            "roof": site_digest(plan, [0.2, None, 0.6], [10.0, 5.0, 10.0], 1.0),
            "barn": site_digest(plan, [0.4, 0.9], [4.0, 16.0], 2.0),
        },
    )
    assert [one.accuracy for one in found.rounds] == [pytest.approx(0.3), None]
    assert [one.seconds for one in found.rounds] == [10.0, 10.0]
    assert found.rounds[-1].until.seconds == amount_or_unknown(20.0)
    assert [one.until.joules.value for one in found.rounds] == [3.0, 6.0]
    assert {task.round for task in found.tasks} == {1, 2}, "a page would look for a round that is none"
    assert (found.outcome, found.rounds[0].arrived) == ("finished", 2)


def test_a_cell_of_sites_is_run_once(cells, tmp_path):
    """A study's second call finds what is there, one that a journal was touched of is run again."""
    study = grid_of(tmp_path, f"{HEAD}{TWO_SEEDS}{SITES}\n[report]\ntarget = 0.1")[0]
    folder = tmp_path / "runs" / study.name
    asked: list[str] = []

    def counted(orders: Sequence[Order], place: Path, tell: Tell) -> None:
        asked.extend(order.cell for order in orders)
        in_this_process(orders, place, tell)

    summary = complete_study(study, {}, cells, folder, counted, lambda _: None)
    assert asked == [cell.name for cell in cells]
    assert summary.is_complete
    for row, cell in zip(summary.rows, cells, strict=True):
        runs = {site: read_records(folder / cell.name / site) for site in ("roof", "barn")}
        ends = {site: closed_rounds(records)[-1].accuracy for site, records in runs.items()}
        assert row.accuracy == pytest.approx(statistics.fmean(ends.values()))
        assert row.best == best_value(digest_cell(folder / cell.name, cell.plan))
        assert row.whole.rounds.value == cell.plan.rounds
        assert row.target
    assert complete_study(study, {}, cells, folder, counted, lambda _: None) == summary
    assert len(asked) == len(cells), "a whole cell was run again"
    with (folder / cells[0].name / "barn" / "journal.jsonl").open("ab") as file:
        file.write(b"\n")
    assert complete_study(study, {}, cells, folder, counted, lambda _: None) == summary
    assert asked[len(cells) :] == [cells[0].name]
    assert (folder / "report.html").exists()


def test_half_a_cell_of_sites_does_not_count(cells, tmp_path):
    folder = run_cell(make_order(cells[0], tmp_path))
    assert read_result(cells[0], folder)
    (folder / "roof" / "journal.jsonl").unlink()
    assert not read_result(cells[0], folder)
    (folder / RESULT).unlink()
    assert not read_result(cells[0], folder)


def test_another_number_of_devices_has_no_sites(tmp_path):
    with pytest.raises(ConfigError, match=naming("devices", "sites")):
        grid_of(tmp_path, f"devices = 5\n{HEAD}{SITES}")
