"""A split run's report: what its sessions exchanged apart from the model, and both in every sum."""

from __future__ import annotations

import csv

import msgspec
import pytest
from msgspec.structs import replace

from edge_server.journal.records import CostSettled, RoundOpened
from edge_server.record.amounts import NONE, UNKNOWN, Amount
from edge_server.report.csv_export import csv_text
from edge_server.report.page import render_page
from edge_server.report.summarise import digest_run, sum_joules
from edge_server.report.targets import costs_to_targets
from edge_server.trial.tables import format_longest_times, rounds_table, total_joules
from shared.protocol.measurements import Cost
from shared.protocol.messages import Assignment, Hyper
from tests.edge_server.report.journals import begin, closed, cost, parsed, rows, section, small, update

STEPS = 4


def exchanged(seconds: float = 2.0) -> Cost:
    """Return a cost with an exchange half as long as its computing, at 4 W: 8000 bytes up, 6000 down."""
    return replace(
        cost(seconds), exchange_s=seconds / 2, exchange_joules=2 * seconds, features_bytes=8000, gradient_bytes=6000
    )


def split_run() -> list:
    """Two rounds of two devices; in the first, one came too late."""
    told = dict.fromkeys("ab", Assignment(seed=1, hyper=Hyper(), steps=STEPS))
    return [
        begin(2),
        RoundOpened(round=1, assignments=told),
        update("a", 1, exchanged()),
        CostSettled(round=1, device="b", cost=exchanged(4.0)),
        closed(1, ["a"], accuracy=0.4, steps=STEPS),
        RoundOpened(round=2, assignments=told),
        *(update(device, 2, exchanged()) for device in "ab"),
        closed(2, ["a", "b"], accuracy=0.8, steps=STEPS),
    ]


def test_an_exchange_is_neither_computing_nor_waiting():
    """4 s: 0.2 down, 2 computing, 1 exchanging, 0.5 up, and 0.3 are left; at 4 W, of which 2 are idling."""
    first = digest_run(split_run()).tasks[0]
    found = {name: getattr(first.seconds, name).value for name in first.seconds.__struct_fields__}
    assert found.pop("statistics") is None
    assert found == pytest.approx({"download": 0.2, "compute": 2.0, "exchange": 1.0, "upload": 0.5, "waiting": 0.3})
    assert first.joules.exchange.value == pytest.approx(4.0)
    assert sum_joules(first).value == pytest.approx(4 * 3.7)
    assert first.joules.above_idle.value == pytest.approx(2 * 3.7)


def test_features_and_gradients_are_told_apart_from_the_model_and_all_bytes_are_both():
    """Of tasks, devices, rounds and the run; a target's bytes are of both too."""
    run = digest_run(split_run())
    assert run.split
    assert (run.tasks[0].features_bytes, run.tasks[0].gradient_bytes) == (Amount(value=8000.0), Amount(value=6000.0))
    assert [one.gradient_bytes.value for one in run.devices] == [12_000.0, 12_000.0]
    one, two = run.rounds
    assert (one.features_bytes.value, one.gradient_bytes.value) == (16_000.0, 12_000.0), "the late device's too"
    assert (two.until.bytes_down.value, two.until.features_bytes.value) == (4000.0, 32_000.0)
    assert two.until.bytes == Amount(value=3000.0 + 4000.0 + 32_000.0 + 24_000.0, whole=False)
    [taken] = costs_to_targets([run], [0.8])
    assert taken.bytes == two.until.bytes


def test_devices_that_train_alone_exchange_nothing_which_is_not_unknown():
    run = digest_run(small())
    assert not run.split
    assert run.tasks[0].seconds.exchange == run.rounds[0].until.features_bytes == NONE
    assert run.rounds[0].until.bytes_down.whole


def test_an_exchange_that_nobody_told_is_unknown():
    """Its waiting too; what a replay without a radio knows of its joules is a bound."""
    told = {"a": Assignment(seed=1, hyper=Hyper(), steps=STEPS)}
    dumb = digest_run([begin(1), RoundOpened(round=1, assignments=told), update("a", 1, cost()), closed(1, ["a"])])
    assert dumb.tasks[0].seconds.exchange == dumb.tasks[0].seconds.waiting == UNKNOWN
    assert dumb.rounds[0].features_bytes == UNKNOWN
    assert dumb.split
    assert not sum_joules(dumb.tasks[0]).whole


def test_the_page_says_which_bytes_are_whose():
    root = parsed(render_page([digest_run(split_run())]))
    found = rows(section(root, "outcome").all("table")[0])
    assert found["model bytes down"] == ["4.00 kB"]
    assert found["features bytes up"] == ["32.0 kB"]
    assert found["gradient bytes down"] == ["24.0 kB"]
    assert found["total bytes"] == ["\N{GREATER-THAN OR EQUAL TO} 63.0 kB"]
    devices = section(root, "time-energy")
    assert devices.all("rect", "exchange")
    alone = section(parsed(render_page([digest_run(small())])), "time-energy")
    assert not alone.all("rect", "exchange")
    assert set(rows(devices.all("table")[-1])) - set(rows(alone.all("table")[-1])), "rows of its own"


def test_a_run_beside_a_split_one_has_no_features():
    found = rows(
        section(parsed(render_page([digest_run(small()), digest_run(split_run())])), "outcome").all("table")[0]
    )
    assert [one.split()[0] for one in found["features bytes up"]] == ["\N{EN DASH}", "32.0"]


def test_the_csv_and_the_json_hold_both():
    run = digest_run(split_run())
    lines = list(csv.DictReader(csv_text([run])))
    found = {(one["round"], one["device"], one["figure"]): one for one in lines}
    assert found["1", "a", "features_bytes"]["value"] == "8000"
    assert found["1", "a", "features_bytes"]["unit"] == "B"
    assert found["1", "a", "seconds.exchange"]["value"] == "1.0"
    assert found["2", "", "gradient_bytes"]["value"] == "12000"
    assert found["", "b", "gradient_bytes"]["value"] == "12000"
    assert found["2", "", "bytes.until"]["value"] == "63000"
    assert not [one for one in csv.DictReader(csv_text([digest_run(small())])) if "exchange" in one["figure"]]
    assert (
        msgspec.json.decode(msgspec.json.encode(run, enc_hook=list))["rounds"][1]["until"]["features_bytes"]["value"]
        == 32_000.0
    )


def test_show_has_a_column_for_the_cut_beside_the_model():
    """In kB down/up, of all devices; and the longest exchange between computing and upload."""
    table = rounds_table(split_run())
    headings = [column.heading for column in table.columns]
    cells = dict(zip(headings, map(list, zip(*table.rows, strict=True)), strict=True))
    assert cells["model"] == ["1.0/1.0", "2.0/2.0"]
    assert cells["cut"] == ["12.0/16.0", "12.0/16.0"]
    assert cells["slowest"] == ["4.00/2.00/1.00", "2.00/1.00/0.50"]
    assert "a" not in cells
    assert [one.heading for one in rounds_table(small()).columns][-2:] == ["a", "b"]


def test_joules_of_an_exchange_are_asked_for_where_there_was_one():
    assert format_longest_times({"a": exchanged()}, split=True) == "2.00/1.00/0.50"
    assert total_joules({"a": exchanged()}) == f"{4 * 3.7:.3g}"
    assert (
        total_joules({"a": replace(exchanged(), exchange_joules=None)}) == f"\N{GREATER-THAN OR EQUAL TO}{4 * 2.7:.3g}"
    )
    assert total_joules({"a": cost()}) == f"{4 * 2.7:.3g}"
