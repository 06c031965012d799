"""Delta encoding of reports: decoding returns the bounded original."""

from __future__ import annotations

import math
import re
from random import Random
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_server.fleet.history import BATCH_S
from edge_server.fleet.tables import COLUMNS, FREE, LINK
from edge_server.journal import report_rows
from shared.protocol.measurements import Absent, Cost, Lack, Quality, Reading, TaskCost
from shared.protocol.messages import Report
from tests.device_agent.sources import report
from tests.edge_server.processes import ROOT

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
READINGS = st.builds(
    Reading,
    value=NUMBERS,
    unit=st.sampled_from(["hertz", "watts"]),
    source=st.sampled_from(["a", "b"]),
    quality=st.sampled_from(["measured", "corrected", "modelled"]),
    at=st.sampled_from([0.0, 9.0, 100.0]),
    uncertainty=st.none() | st.floats(0, 1e9),
)
SPENT = st.builds(TaskCost, run=st.just("run"), round=st.integers(0, 3), cost=st.builds(Cost, upload_s=st.floats(0, 9)))
REPORTS = st.builds(
    Report,
    device=st.just("pi"),
    at=st.just(100.0),
    readings=st.dictionaries(st.sampled_from("abcd"), READINGS),
    absent=st.dictionaries(st.sampled_from("ef"), st.builds(Absent, lack=st.sampled_from(["busy", "denied"]))),
    facts=st.dictionaries(st.sampled_from("gh"), st.text(max_size=9)),
    spent=st.none() | SPENT,
    instance=st.sampled_from("xy"),
)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(REPORTS, st.data())
def test_changes_tell_a_report_from_the_one_before(first, data):
    """Whatever differs: values, uncertainties that come and go, moments; both parts pass through bytes."""
    form, before = report_rows.split_report(first)
    readings = {
        name: msgspec.structs.replace(
            one,
            value=data.draw(st.just(one.value) | NUMBERS),
            uncertainty=data.draw(st.just(one.uncertainty) | st.none() | st.floats(0, 9)),
            at=data.draw(st.sampled_from([one.at, 50.0])),
        )
        for name, one in first.readings.items()
    }
    spent = data.draw(st.just(first.spent) | SPENT)
    second = msgspec.structs.replace(first, readings=readings, spent=spent)
    same, row = report_rows.split_report(second)
    assert same == form
    changed = report_rows.decode_row(report_rows.encode_part(report_rows.row_changes(before, row)))
    read = report_rows.decode_form(report_rows.encode_part(form))
    assert report_rows.join_report("pi", 100.0, read, report_rows.apply_changes(before, changed)) == second


def test_a_report_of_a_real_board_loses_nothing():
    """But a probe's moment, where it was asked within a second of the report."""
    whole = report(Random(1), 100.0)
    form, row = report_rows.split_report(whole)
    assert report_rows.join_report("orin", 100.0, form, row) == whole
    late = {name: msgspec.structs.replace(one, at=99.5) for name, one in whole.readings.items()}
    form, row = report_rows.split_report(msgspec.structs.replace(whole, readings=late))
    assert {one.at for one in report_rows.join_report("orin", 100.0, form, row).readings.values()} == {100.0}
    assert row.moments == {}
    early = {name: msgspec.structs.replace(one, at=40.0) for name, one in list(whole.readings.items())[1:]}
    again = msgspec.structs.replace(whole, readings=dict(list(whole.readings.items())[:1]) | early)
    form, row = report_rows.split_report(again)
    assert report_rows.join_report("orin", 100.0, form, row) == again
    assert (row.most_at, row.moments) == (40.0, {0: 100.0})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_becomes_an_absence(value):
    """No reader divides by it; that it came is not hidden."""
    good = Reading(value=1.0, unit="W", source="s", quality="measured", at=1.0, uncertainty=value)
    bad = msgspec.structs.replace(good, value=value)
    said = Report(device="pi", at=1.0, readings={"good": good, "bad": bad})
    form, row = report_rows.split_report(said)
    kept = report_rows.join_report("pi", 1.0, form, row)
    assert kept.readings == {"good": msgspec.structs.replace(good, uncertainty=None)}
    assert kept.absent.keys() == {"bad"}
    assert kept.absent["bad"].lack == "invalid"


def hostile() -> dict[str, Report]:
    """Return reports of up to a MiB."""
    one = Reading(value=0.1, unit="", source="", quality="measured", at=1.0)
    long = Reading(value=0.1, unit="u" * 10**5, source="é" * 10**5, quality="measured", at=1.0)
    spent = TaskCost(run="../../etc/passwd", round=1, cost=Cost())
    return {
        "many": Report(device="pi", at=1.0, readings={f"{i:x}": one for i in range(16_000)}),
        "long": Report(device="pi", at=1.0, board="b" * 10**6, readings={str(i): long for i in range(300)}),
        "names": Report(device="pi", at=1.0, readings={"n" * (90 + i): long for i in range(300)}, instance="i" * 999),
        "absent": Report(
            device="pi", at=1.0, absent={f"{i:x}": Absent(lack="busy", cause="c" * 999) for i in range(500)}
        ),
        "facts": Report(device="pi", at=1.0, facts={f"{i:x}": "f" * 999 for i in range(500)}, spent=spent),
    }


@pytest.mark.parametrize("kind", hostile())
def test_whatever_a_device_says_is_bounded(kind):
    """Names, texts and their number; a part of it is kept, and reads back."""
    form, row = report_rows.split_report(hostile()[kind])
    assert len(report_rows.encode_part(form)) <= report_rows.MAX_FORM_BYTES
    assert len(report_rows.encode_part(row)) <= report_rows.MAX_FIGURES * 40
    assert report_rows.decode_form(report_rows.encode_part(form)) == form
    kept = report_rows.join_report("pi", 1.0, form, row)
    assert kept.readings or kept.absent or kept.facts
    assert kept.spent is None


def test_the_protocol_page_says_what_is_kept_and_which_words_there_are():
    """Numbers and words that a second implementation would copy from it."""
    page = (ROOT / "shared" / "protocol" / "PROTOCOL.md").read_text()
    found = re.search(r"^## Reports\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    assert found
    assert f"at most {report_rows.MAX_FIGURES} readings and {report_rows.MAX_FORM_BYTES >> 10} KiB" in found[1]
    assert f"at most a report each {BATCH_S:.0f} s" in found[1]
    assert {word for word in (*get_args(Quality), *get_args(Lack)) if f"`{word}`" not in found[1]} == set()
    shown = {column.reading for column in (*COLUMNS, *LINK, FREE)}
    assert {name for name in shown if f"`{name}`" not in found[1]} == set()
