"""The page holds all figures, nothing that a device wrote as markup, and loads nothing."""

from __future__ import annotations

import re

import msgspec
import pytest

from edge_server.journal.records import RoundOpened, RunClosed
from edge_server.report.charts import MOST_POINTS, thin_points
from edge_server.report.page import render_page
from edge_server.report.summarise import digest_run
from edge_server.report.targets import round_reaching
from shared.protocol.messages import Assignment, Hyper
from tests.edge_server.report.journals import (
    MODELLED,
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

DASH, AT_LEAST = "\N{EN DASH}", "\N{GREATER-THAN OR EQUAL TO}"


def points(root) -> list[int]:
    """How many points each curve has, chart by chart."""
    return [len(one.all("path", "point")) for chart in root.all("div", "charts") for one in chart.all("g")]


def test_every_evaluated_round_is_a_point_of_every_chart():
    """Three figures over four axes in the first block; what was told, by device, in the second."""
    root = parsed(render_page([digest_run(small())]))
    curves = section(root, "progress")
    assert points(curves) == [2] * 12
    first, second = [one.text for one in curves.all("title")][:2]
    assert names_all(first, "run", 1, 40)
    assert names_all(second, "run", 2, 80)
    assert points(section(root, "decisions")) == [2, 2]


def test_a_round_without_an_evaluation_is_no_point():
    records = [begin(3), *(closed(n, [], accuracy=0.5 if n == 2 else None, test_loss=None) for n in (1, 2, 3))]
    curves = section(parsed(render_page([digest_run(records)])), "progress")
    assert points(curves)[:2] == [1, 1], "accuracy over rounds and seconds"


def test_what_a_run_came_to():
    found = rows(section(parsed(render_page([digest_run(small())])), "outcome").all("table")[0])
    assert found["accuracy at the end"] == ["80.00 %"]
    assert found["accuracy on devices"] == ["70.00 %"]
    assert found["seconds (virtual)"] == ["8.00 s"]
    assert found["joules"] == ["70.2 J"]
    assert found["bytes up"] == [f"{AT_LEAST} 3.00 kB"]
    assert [found[f"updates {one}"] for one in ("arrived", "late", "failed")] == [["3"], ["1"], ["0"]]


def test_what_is_not_known_is_a_dash_and_never_zero():
    records = [begin(1), opened(1, ["a"]), update("a", 1, cost(watts=None)), closed(1, ["a"], accuracy=None)]
    root = parsed(render_page([digest_run(records)]))
    found = rows(section(root, "outcome").all("table")[0])
    assert [found[name] for name in ("accuracy at the end", "joules", "accuracy on devices")] == [[DASH]] * 3
    assert "0 J" not in root.words()


def test_what_a_run_took_to_an_accuracy():
    """At the end of round 2, the first with at least 0.5; 0.9 it never reached."""
    runs = [digest_run(small())]
    assert round_reaching(runs[0], 0.8) is runs[0].rounds[1], "an accuracy is reached where it is met"
    [table] = section(parsed(render_page(runs, [0.5, 0.9])), "targets").all("table")
    found = rows(table)
    found.pop("accuracy")
    assert found == {
        "50.00 %": ["run", "2", "8.00 s", "70.2 J", f"{AT_LEAST} 7.00 kB"],
        "90.00 %": [found["90.00 %"][0], *[DASH] * 4],
    }
    assert names_all(found["90.00 %"][0], "run", "80.00 %")


def test_usual_targets_are_what_every_run_reached():
    runs = [digest_run(small()), digest_run([begin(1, run="other"), closed(1, [], accuracy=0.6049)])]
    [table] = section(parsed(render_page(runs)), "targets").all("table")
    assert [row.children[0].text for row in table.all("tr")][1:] == ["60.00 %"] * 2 + ["55.00 %"] * 2 + ["50.00 %"] * 2


def test_runs_are_compared_with_the_first():
    """Twice the bytes, 10 points less; the change of a bound is not known."""
    one = [begin(1), opened(1, ["a"]), update("a", 1, cost()), closed(1, ["a"], accuracy=0.7)]
    two = [
        *(begin(1, run="two"), opened(1, ["a", "b"]), update("a", 1, cost()), update("b", 1, cost(watts=None))),
        closed(1, ["a", "b"], accuracy=0.6),
    ]
    found = rows(section(parsed(render_page([digest_run(one), digest_run(two)])), "outcome").all("table")[0])
    assert found["accuracy at the end"] == ["70.00 %", "60.00 % \N{MINUS SIGN}10.0 points"]
    assert found["bytes up"] == ["1.00 kB", "2.00 kB +100.0 %"]
    assert found["joules"] == ["10.8 J", f"{AT_LEAST} 10.8 J"]


def test_wall_and_virtual_seconds_are_told_apart_and_not_compared():
    runs = [digest_run(small(live=True)), digest_run(small(run="replay"))]
    root = parsed(render_page(runs))
    found = rows(section(root, "outcome").all("table")[0])
    assert found["seconds (virtual or wall)"] == ["8.00 s wall", "8.00 s virtual"]
    assert names_all(section(root, "progress").words(), "virtual", "wall")
    assert not names_all(section(parsed(render_page(runs[:1])), "progress").words(), "virtual")


def test_qualities_are_marked():
    records = [begin(1), opened(1, ["a"]), update("a", 1, cost(provenance=MODELLED)), closed(1, ["a"])]
    root = parsed(render_page([digest_run(records)]))
    assert rows(section(root, "outcome").all("table")[0])["joules"] == ["10.8 J ≈"]
    assert "≈" in root.all("footer")[0].words()


def test_the_bars_of_a_device_are_its_seconds_and_joules():
    """Of a: 0.4 + 4 + 1 of 8 s, of which it waited 2.6 s; the widest bar is b's, whose late task took 8.1 s."""
    root = section(parsed(render_page([digest_run(small())])), "time-energy")
    wide = 0.6 + 6.0 + 1.5 + 0.3 + 3.0 + 0.75
    [time, energy] = [figure.all("svg", "bar") for figure in root.all("figure")]
    widths = [float(rect.attributes["width"]) for rect in time[0].all("rect")]
    assert widths == pytest.approx([1000 * part / wide for part in (0.4, 4.0, 1.0, 2.6)], abs=0.06)
    assert sum(float(rect.attributes["width"]) for rect in time[1].all("rect")) == pytest.approx(1000, abs=0.3)
    assert [rect.attributes["class"] for rect in energy[1].all("rect")] == ["download", "compute", "upload"]


def test_what_of_the_time_is_not_known_is_shown_as_that():
    cut = msgspec.structs.replace(cost(), upload_s=None)
    root = parsed(render_page([digest_run([begin(1), opened(1, ["a"]), update("a", 1, cut), closed(1, ["a"])])]))
    rects = root.all("svg", "bar")[0].all("rect")
    assert [rect.attributes["class"] for rect in rects] == ["download", "compute", "unknown"]
    assert float(rects[-1].attributes["width"]) == pytest.approx(1000 * 1.8 / 4.0)


def test_quantiles_are_of_what_is_known_in_full():
    """Of two tasks of 2 s and 4 s the median took 3 s; a bound on what one of them spent is no figure of the spread."""
    cut = msgspec.structs.replace(cost(4.0), upload_joules=None)
    records = [begin(1), opened(1, ["a", "b"]), update("a", 1, cost(2.0)), update("b", 1, cut), closed(1, ["a", "b"])]
    root = section(parsed(render_page([digest_run(records)])), "time-energy")
    found = rows(root.all("table")[-1])
    assert found["compute, virtual time"] == [
        "2 of 2",
        "2.00 s",
        "2.10 s",
        "2.50 s",
        "3.00 s",
        "3.50 s",
        "3.90 s",
        "4.00 s",
    ]
    assert found["energy above idle"][:2] == ["1 of 2", "5.40 J"]


def test_every_task_is_a_cell_of_the_grid():
    """Drawn one by one: as many beginnings in the path of what became of them as there are tasks."""
    run = digest_run(many(30, 20, 12))
    [grid] = parsed(render_page([run])).all("svg", "grid")
    for arrival in ("arrived", "late", "failed"):
        [cells] = grid.all("path", arrival)
        assert len(re.findall("M", cells.attributes["d"])) == sum(task.arrival == arrival for task in run.tasks)
    assert [one.text for one in grid.all("text")][:2] == ["device-00000", "device-00001"]


HOSTILE = '</style><script>alert(1)</script><img src="http://x.test/a.png" onerror=1>" onload="x\u202e\x00'


def test_what_devices_and_plans_say_is_text():
    """A failure's cause, a device's name, a value it was told, a run's name and its end: none becomes markup."""
    told, plain = ({HOSTILE: 0.5, "word": HOSTILE}, {HOSTILE: 1.0})
    assignments = {name: Assignment(seed=1, hyper=Hyper(), values=one) for name, one in ((HOSTILE, told), ("b", plain))}
    records = [
        begin(1, run=HOSTILE),
        RoundOpened(round=1, assignments=assignments),
        closed(1, ["b"], failed={HOSTILE: HOSTILE}, refused={HOSTILE: 1}),
        RunClosed(outcome="stopped", cause=HOSTILE),
    ]
    text = render_page([digest_run(records)])
    root = parsed(text)
    assert not {"script", "img", "iframe", "link", "object", "base", "form"} & {one.name for one in root.all()}
    assert not [name for one in root.all() for name in one.attributes if name.startswith("on")]
    assert len(root.all("style")) == 1
    assert not {"\u202e", "\x00"} & set(text)
    assert text.count("alert(1)") >= 6, "it is there, as text"


def test_a_long_text_is_cut():
    records = [begin(1), opened(1, ["a"]), closed(1, [], failed={"a": "x" * 100_000})]
    assert len(render_page([digest_run(records)])) < len(render_page([digest_run(small())])) + 10_000


def test_the_page_needs_nothing_else():
    """No address in it, no script, and a policy that would refuse both; both colour schemes are in the page."""
    text = render_page([digest_run(small())])
    root = parsed(text)
    policy = [one.attributes["content"] for one in root.all("meta") if "http-equiv" in one.attributes]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]
    assert not re.search(r"https?:|url\(|@import|src=|href=", text)
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_every_colour_that_is_used_is_defined_in_both_schemes():
    [style] = parsed(render_page([digest_run(small())])).all("style")
    light, dark = re.findall(r":root \{([^}]*--paper: #[^}]*--ink[^}]*)\}", style.text)
    names = {name for name in re.findall(r"var\((--[a-z0-9]+)\)", style.text) if name != "--c"}
    assert names <= set(re.findall(r"(--[a-z0-9]+):", light)) == set(re.findall(r"(--[a-z0-9]+):", dark))


def test_who_was_there_is_a_curve_of_its_own():
    """Round 2 did not say; where no round does, there is no such chart."""
    records = [begin(3)]
    for number, online in ((1, 5), (2, None), (3, 4)):
        records += [msgspec.structs.replace(opened(number, ["a"]), online=online), closed(number, ["a"])]
    found = section(parsed(render_page([digest_run(records)])), "decisions")
    assert points(found) == [2]


def test_a_large_run_makes_a_small_page():
    """100 rounds of 100 devices, each of which has its two bars, and a point of every curve."""
    text = render_page([digest_run(many(100, 100, 100))])
    assert len(text.encode()) < 1e6
    assert text.count('class="bar"') == 200
    assert text.count('class="point"') == 12 * 100 + 100 + 4, "and one chart of what was told, and four keys"


def test_a_large_fleet_is_shown_in_quantiles_and_the_page_says_so():
    run = digest_run(many(5000, 20, 100))
    text = render_page([run])
    assert len(text.encode()) < 0.3e6
    root = parsed(text)
    assert root.all("svg", "bar") == root.all("svg", "grid") == []
    assert names_all(section(root, "time-energy").words(), len(run.devices))
    assert names_all(section(root, "timeline").words(), len(run.devices), 20)
    [table] = section(root, "time-energy").all("table")
    arrived = sum(one.arrived for one in run.rounds)
    assert rows(table)["compute, virtual time"][0] == f"{arrived} of 2000"


def test_a_long_run_is_drawn_with_fewer_points():
    """Evenly, the first and the last among them."""
    assert thin_points(range(1000))[0] == 0
    assert thin_points(range(1000))[-1] == 999
    assert len(set(thin_points(range(1000)))) == MOST_POINTS
    assert list(thin_points(range(MOST_POINTS))) == list(range(MOST_POINTS))


def test_a_run_that_has_not_got_anywhere_has_a_page():
    root = parsed(render_page([digest_run([begin(3)])]))
    assert rows(section(root, "outcome").all("table")[0])["outcome"] == ["unfinished"]
    assert names_all(section(root, "outcome").words(), "0 of 3")
