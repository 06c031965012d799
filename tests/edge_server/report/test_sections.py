"""What stands where on the page: rows of charts, legends, accuracy by class and device, the timeline."""

from __future__ import annotations

import pytest

from edge_server.journal.records import Evaluated, RoundOpened
from edge_server.report.csv_export import csv_text
from edge_server.report.page import render_page
from edge_server.report.sections.decisions import BOOKKEEPING
from edge_server.report.summarise import digest_run
from edge_server.trial.tables import rounds_table
from shared.algorithms.personal_model import MODEL_DRAW, MODEL_SEED
from shared.algorithms.split.settings import FedslSettings
from shared.algorithms.subnetwork.server_half import CHAIN
from shared.protocol.messages import STATISTICS, Assignment, Hyper
from tests.edge_server.report.journals import (
    Element,
    begin,
    closed,
    cost,
    many,
    opened,
    parsed,
    rows,
    section,
    small,
    update,
)
from tests.naming import names_all

SHARES = (0.9, None, 0.25)


def ticks_of(figure: Element) -> tuple[list[str], list[str]]:
    """Return the figures beside the upright axis and below the lower one."""
    texts = [one for one in figure.all("text") if one.attributes.get("class") != "name"]
    upright = [one.text for one in texts if one.attributes["text-anchor"] == "end"]
    return upright, [one.text for one in texts if one.attributes["text-anchor"] == "middle"]


def test_a_metric_is_one_row_whose_charts_share_their_axes():
    """Tested every other round: its charts reach as far as those of the training loss, which every round has."""
    records = [begin(4)]
    for number in range(1, 5):
        tested = {"accuracy": 0.2 * number, "test_loss": 1.0} if number < 3 else {"accuracy": None, "test_loss": None}
        records += [opened(number, ["a"]), update("a", number, cost(2.0)), closed(number, ["a"], **tested)]
    metrics = section(parsed(render_page([digest_run(records)])), "progress").all("div", "metric")
    captions = [{one.all("figcaption")[0].text for one in metric.all("figure")} for metric in metrics]
    assert list(map(len, captions)) == [1, 1, 1]
    assert len(set.union(*captions)) == 3
    axes = [[ticks_of(figure) for figure in metric.all("figure")] for metric in metrics]
    assert all(len({tuple(upright) for upright, _ in row}) == 1 for row in axes)
    assert all(len({tuple(lower) for _, lower in column}) == 1 for column in zip(*axes, strict=True))


def test_what_no_run_knows_has_no_card():
    """Energy, here: neither charts over it nor an empty figure nor columns of dashes, but one sentence each."""
    records = [begin(1), opened(1, ["a"]), update("a", 1, cost(watts=None)), closed(1, ["a"])]
    root = parsed(render_page([digest_run(records)]))
    assert [len(one.all("figure")) for one in root.all("div", "metric")] == [3, 3, 3]
    spent = section(root, "time-energy")
    assert len(spent.all("figure")) == 1
    assert not [one for one in spent.all("th") if "energy" in one.text]


def test_lines_by_device_have_a_legend():
    found = section(parsed(render_page([digest_run(small())])), "decisions")
    [keys] = [one for one in found.all("p", "legend") if one.all("path", "line")]
    assert [one.text for one in keys.all("span")] == ["a", "b"]
    lines = [line.attributes["class"] for line in found.all("div", "charts")[0].all("g")]
    assert lines == [one.attributes["class"] for one in keys.all("g")], "in the colours of the lines"


def test_the_line_of_a_large_fleet_has_a_legend():
    found = section(parsed(render_page([digest_run(many(20, 3, 20))])), "decisions")
    [keys] = [one for one in found.all("p", "legend") if one.all("path", "line")]
    assert len(keys.all("path", "line")) == 1


def test_bookkeeping_is_no_decision():
    """Where a device is in its schedule, and seeds: neither charts nor words of what was told."""
    books = {name: float(place) for place, name in enumerate(sorted(BOOKKEEPING))}
    records = [begin(2)]
    for number in (1, 2):
        values = {**{name: value * number for name, value in books.items()}, "keep": 0.5 / number, "bits": 8}
        told = Assignment(seed=1, hyper=Hyper(), values=values)
        records += [RoundOpened(round=number, assignments={"a": told}), closed(number, ["a"])]
    found = section(parsed(render_page([digest_run(records)])), "decisions")
    _, keep = (one.text for one in found.all("figcaption"))
    assert names_all(keep, "keep")
    assert not [name for name in BOOKKEEPING if name in found.words()]
    assert "bits 8" in found.words()


def test_bookkeeping_has_the_names_that_methods_give_it():
    assert {MODEL_SEED, MODEL_DRAW, CHAIN, STATISTICS} < BOOKKEEPING
    assert {"first_step", "total_steps"} < BOOKKEEPING
    assert not BOOKKEEPING & {*FedslSettings.__dataclass_fields__}


def test_accuracy_by_class_stands_side_by_side():
    """Of the last round that was tested; a class without examples is a dash."""
    runs = [
        [begin(2), closed(1, [], class_accuracy=(0.1, None, 0.1)), closed(2, [], class_accuracy=SHARES)],
        [begin(2, run="b"), RoundOpened(round=1, assignments={}, classes=("cat", "dog", "owl")), closed(1, [])],
    ]
    digests = [digest_run(one) for one in runs]
    [table] = section(parsed(render_page(digests)), "accuracy").all("table")
    found = rows(table)
    assert [found[name][0] for name in ("0 cat", "1 dog", "2 owl")] == [
        "90.00 % 1. run: 90.00 %",
        "\N{EN DASH}",
        "25.00 % 1. run: 25.00 %",
    ]
    assert [float(one.attributes["width"]) for one in table.all("rect")] == pytest.approx([900, 250])
    assert "run,2,,class_accuracy.2,0.25," in "".join(csv_text(digests))


def test_a_methods_own_figures_are_in_charts_tables_and_lines():
    """Loss terms and supervised steps, of a run that has them; `show` leaves them out where there is no room."""
    terms = [{"clustering_loss": 2.5, "supervised_steps": 20.0}, {"clustering_loss": 1.5, "supervised_steps": 13.0}]
    records = [begin(2), *(closed(number, [], terms=one) for number, one in enumerate(terms, 1))]
    runs = [digest_run(records), digest_run([begin(2, run="b"), closed(1, [])])]
    captions = {one.text for one in parsed(render_page(runs)).all("figcaption")}
    assert {"clustering loss", "supervised steps"} <= captions
    assert "clustering loss" not in {one.text for one in parsed(render_page(runs[1:])).all("figcaption")}
    assert "run,2,,terms.clustering_loss,1.5," in "".join(csv_text(runs))
    table = rounds_table(records)
    assert [one.heading for one in table.columns][-2:] == ["clustering\nloss", "supervised\nsteps"]
    assert [row[-2:] for row in table.rows] == [("2.5", "20"), ("1.5", "13")]
    narrow = rounds_table(records, width=70)
    assert [one.heading for one in narrow.columns] == [one.heading for one in table.columns][:-2]


def test_accuracy_by_device_is_on_the_page():
    two = [*small(run="two"), Evaluated(accuracy=0.5, by_device={"b": {"eval_accuracy": 0.5}})]
    root = parsed(render_page([digest_run(small()), digest_run(two)]))
    [table] = section(root, "accuracy").all("table")
    texts = {row.all("th")[0].text: [one.text for one in row.all("td")] for row in table.all("tr")[1:]}
    assert texts == {"a": ["75.00 %", "\N{EN DASH}"], "b": ["\N{EN DASH}", "50.00 %"]}


def test_a_run_that_measured_neither_has_no_such_section():
    root = parsed(render_page([digest_run([begin(1), closed(1, [])])]))
    assert "accuracy" not in [one.attributes["id"] for one in root.all("section")]


def test_the_timeline_shows_each_round_and_what_devices_did_in_it():
    """Two rounds of 4 s: b is late in the first, so that its bar fills it; a waits the rest of both."""
    found = section(parsed(render_page([digest_run(small())])), "timeline").all("svg", "timeline")[0]
    bars = [one for one in found.all("rect") if one.all("title")]
    assert all(names_all(bar.all("title")[0].text, n, "aggregated", "4.00 s") for n, bar in enumerate(bars, 1))
    assert len(bars) == 2
    one, two = (float(bar.attributes["x"]) for bar in bars)
    assert two - one == pytest.approx(float(bars[0].attributes["width"]) + 1, abs=0.2)
    paths = {one.attributes["class"]: one.attributes["d"].count("M") for one in found.all("path") if one.all("title")}
    assert paths == {"download": 4, "compute": 4, "upload": 3, "waiting": 2}
    assert [one.text for one in found.all("text") if one.attributes["text-anchor"] == "end"][1:] == ["a", "b"]


def test_the_timeline_of_a_large_fleet_has_its_rounds():
    found = section(parsed(render_page([digest_run(many(100, 30, 100))])), "timeline")
    assert len([one for one in found.all("rect") if one.all("title")]) == 30
    assert names_all(found.words(), 100, 30)


def test_outcomes_of_three_runs_have_the_whole_width():
    """And those of two stand beside what the runs took to an accuracy."""
    for count, beside in ((1, 1), (2, 1), (3, 0)):
        runs = [digest_run(small(run=f"run-{number}")) for number in range(count)]
        assert len(parsed(render_page(runs)).all("div", "two")) == beside
