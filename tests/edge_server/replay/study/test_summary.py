"""A summary is arithmetic on what the cells left, and what is not known is never zero."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Literal

import msgspec
import pytest
from rich.console import Console

from edge_server.journal.compared_metric import ComparedMetric
from edge_server.journal.records import AnyRecord, CostSettled, RoundClosed, RoundOpened, RunClosed, RunOpened
from edge_server.record.amounts import UNKNOWN, Amount, amount_or_unknown
from edge_server.replay.study.grid import Cell
from edge_server.replay.study.result import CellEnded, CellStarted, Result
from edge_server.replay.study.summary import StudySummary, spread_of_seeds, summarise
from edge_server.replay.study.tables import cells_csv, groups_csv, tables
from edge_server.replay.study.terminal import StudyDisplay
from edge_server.report.summarise import digest_run
from shared.protocol.messages import Assignment, Cost, Hyper
from shared.runtime.text_table import write_text
from tests.edge_server.fleets import HEAD, TWO_SEEDS, grid_of
from tests.naming import names_all

PM = "\N{PLUS-MINUS SIGN}"
VERSIONS = {"torch": "2.0"}
UNMEASURED = Cost()
Ending = Literal["finished", "stopped"]


def result(cell: Cell, accuracies: list[float | None], cost: Cost = UNMEASURED, end: Ending = "finished") -> Result:
    """Return what a cell left whose rounds took 10 s, 100 bytes and this cost, all of one device."""
    records: list[AnyRecord] = [RunOpened(run=cell.name, plan=cell.plan)]
    for number, accuracy in enumerate(accuracies, 1):
        size = {"a": 50}
        records += [
            RoundOpened(round=number, assignments={"a": Assignment(seed=0, hyper=Hyper())}),
            CostSettled(round=number, device="a", cost=cost),
            RoundClosed(
                round=number,
                outcome="aggregated",
                arrived=("a",),
                accuracy=accuracy,
                seconds=10.0,
                bytes_up=size,
                bytes_down=size,
            ),
        ]
    found = digest_run([*records, RunClosed(outcome=end)])
    return Result(devices=0, seconds=1.0, versions=VERSIONS, journal="", digest=found)


@pytest.fixture
def cells(tmp_path: Path) -> list[Cell]:
    """Two settings of two seeds: rate 0.1 and 0.2."""
    return grid_of(tmp_path, f'{HEAD}[grid]\n"hyper.learning_rate" = [0.1, 0.2]\nseed = [1, 2]')[1]


def summary_of(cells: list[Cell]) -> StudySummary:
    """Rate 0.1 reaches 0.5 in rounds 1 and 3; of rate 0.2 one run failed and one never gets there."""
    a, b, c, d = cells
    results = {
        a.name: result(a, [0.5, 0.9, 0.8], Cost(download_joules=0.5, compute_joules=1.0, upload_joules=0.5)),
        b.name: result(b, [0.2, None, 0.6], Cost(compute_joules=4.0)),
        c.name: result(c, [0.1, 0.3, None], end="stopped"),
    }
    return summarise("study", cells, results, {d.name: "it died"}, target=0.5)


def test_figures_of_a_setting_are_over_its_seeds(cells):
    """Final 0.8 and 0.6: mean 0.7, s = 0.2/sqrt(2). To 0.5: 10 s and 30 s, 2 J and at least 12 J, 100 B and 300 B."""
    one, other = summary_of(cells).groups
    assert (one.setting, one.cells, one.ended, one.reached) == ("hyper.learning_rate=0.1", 2, 2, 2)
    assert one.accuracy.mean.value == pytest.approx(0.7)
    assert one.accuracy.std == pytest.approx(0.2 / 2**0.5)
    assert one.best.mean.value == pytest.approx(0.75)
    assert one.target
    assert [getattr(one.target, kind).mean.value for kind in ("rounds", "seconds", "joules", "bytes")] == [
        2,
        20,
        7,
        200,
    ]
    assert (one.target.seconds.mean.whole, one.target.joules.mean.whole) == (True, False)
    assert (other.cells, other.ended, other.reached, other.target) == (2, 1, 0, None)
    assert (other.accuracy.mean.value, other.accuracy.std, other.accuracy.count) == (0.3, None, 1)
    assert other.whole.joules.mean == UNKNOWN


def test_every_cell_has_a_row(cells):
    """With its state and why; a study with a cell that did not end is not whole, one with a stopped run is."""
    summary = summary_of(cells)
    assert [(row.state, row.cause) for row in summary.rows] == [
        *[("finished", "")] * 2,
        ("stopped", ""),
        ("failed", "it died"),
    ]
    assert not summary.is_complete
    assert summary.versions == [VERSIONS]
    first = {cell.name: result(cell, [0.5]) for cell in cells[:3]}
    assert [row.state for row in summarise("s", cells, first, {}).rows] == [*["finished"] * 3, "waiting"]
    assert summarise("s", cells[:3], first, {}).is_complete


def test_what_is_not_known_is_not_zero():
    """The mean is of those that know; a lower bound makes a lower bound of it."""
    assert spread_of_seeds([]).mean == UNKNOWN
    assert spread_of_seeds([UNKNOWN, UNKNOWN]).count == 0
    assert spread_of_seeds([amount_or_unknown(1.0), UNKNOWN]).mean == Amount(value=1.0), (
        "a mean of what is wholly known is"
    )
    found = spread_of_seeds([amount_or_unknown(1.0), UNKNOWN, Amount(value=3.0, whole=False)])
    assert (found.mean.value, found.mean.whole, found.count) == (2.0, False, 2)


def test_the_tables_say_the_same(cells):
    """On a terminal with units, in the files in SI units and without any rounding."""
    summary = summary_of(cells)
    file = io.StringIO()
    write_text(file, tables(summary))
    text = file.getvalue()
    assert f"70.00 {PM} 14.14 %" in text
    assert f"20.0 {PM} 14.1 s" in text
    assert f"\N{GREATER-THAN OR EQUAL TO} 7.00 {PM} 7.07 J" in text
    assert "2/2" in text
    rows = list(csv.DictReader(io.StringIO(cells_csv(summary.rows))))
    assert [row["hyper.learning_rate"] for row in rows] == ["0.1", "0.1", "0.2", "0.2"]
    assert [row["target_seconds"] for row in rows] == ["10.0", "30.0", "", ""]
    assert [row["joules"] for row in rows] == ["6.0", "12.0", "", ""]
    assert [row["joules_whole"] for row in rows] == ["True", "False", "", ""]
    groups = list(csv.DictReader(io.StringIO(groups_csv(summary.groups))))
    assert [group["target_bytes_mean"] for group in groups] == ["200.0", ""]
    assert msgspec.json.decode(msgspec.json.encode(summary), type=StudySummary) == summary


def test_a_failed_cell_does_not_know_the_metric_of_the_others(cells):
    """Its row has that column, too; writing the table failed."""
    a, b, *_ = cells
    left = result(a, [0.5])
    compared = ComparedMetric(name="mae", direction="min")
    left = msgspec.structs.replace(left, digest=msgspec.structs.replace(left.digest, compared=compared))
    summary = summarise("study", [b, a], {a.name: left}, {b.name: "it died"})
    for text in (cells_csv(summary.rows), groups_csv(summary.groups)):
        assert "mae" in text
        assert "accuracy" not in text


def test_progress_counts_and_reckons():
    """Four cells, one done before; two more of them in 20 s leave one, so about 10 s."""
    now = [0.0]
    console = Console(file=io.StringIO(), width=200)
    display = StudyDisplay(console, 4, 1, lambda: now[0])
    assert names_all(display.status(), "1/4")
    display.tell(CellStarted("a", 1))
    display.tell(CellStarted("b", 2))
    now[0] = 20.0
    display.tell(CellEnded("a", ""))
    display.tell(CellEnded("b", "SIGKILL"))
    assert names_all(display.status(), "2/4", 0, 1, "10 s")
    assert names_all(console.file.getvalue(), "b", "SIGKILL")  # type: ignore[attr-defined]


def test_seeds_are_averaged_where_nothing_else_differs(tmp_path):
    """One setting, two runs."""
    found = grid_of(tmp_path, HEAD + TWO_SEEDS)[1]
    [group] = summarise("s", found, {cell.name: result(cell, [0.5]) for cell in found}, {}).groups
    assert (group.setting, group.ended, group.accuracy.std) == ("plan", 2, 0.0)
