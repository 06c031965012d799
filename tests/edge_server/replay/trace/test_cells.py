"""Texts from devices become no formulas of a spreadsheet, and are read back as they were; figures stay figures."""

from __future__ import annotations

import csv

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_server.record.build import BOARD
from edge_server.record.rows import Fact, Sample, columns
from edge_server.replay.trace import files
from edge_server.replay.trace.cells import FORMULA, format_row, parse_row
from edge_server.replay.trace.header import FILE
from edge_server.replay.trace.trace import Trace
from edge_server.replay.trace.transfer import export, import_trace
from tests.edge_server.replay.trace.test_round_trip import export_field_run, texts

HOSTILE = ("=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(A1)", "'=1", "''", "\t=1", "-5")
printable = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1) | st.sampled_from(HOSTILE).map(
    lambda text: text.replace("\t", " ")
)


@given(printable, printable)
def test_any_text_comes_back_as_it_was_and_none_begins_as_a_formula(name, value):
    fact = Fact(at_s=1.0, device="pi", name=name, value=value)
    found = format_row("facts", fact)
    assert not [cell for cell in found if cell.startswith(("=", "+", "-", "@", "\t", "\r"))]
    assert parse_row("facts", dict(zip(columns("facts"), found, strict=True))) == fact


def test_a_figure_below_zero_stays_a_figure():
    sample = Sample(at_s=1.0, device="pi", name="thermal.cpu_celsius", value=-5.5, unit="°C", quality="measured")
    found = dict(zip(columns("readings"), format_row("readings", sample), strict=True))
    assert found["value"] == "-5.5"
    assert parse_row("readings", found) == sample


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_word_goes_through_a_trace_and_a_run_unchanged(tmp_path, text):
    """From a trace to a run and to the same bytes again; in the file it has the mark."""
    trace = files.read(export_field_run(tmp_path))
    facts = tuple(one if one.name == BOARD else msgspec.structs.replace(one, value=text) for one in trace.facts)
    files.write(Trace(trace.header, {**trace.tables, "facts": facts}), tmp_path / "hostile")
    import_trace(files.read(tmp_path / "hostile"), tmp_path / "to")
    export(tmp_path / "to", "field-1", tmp_path / "again", tmp_path)
    assert texts(tmp_path / "hostile") == texts(tmp_path / "again")
    shown = text.replace("\t", " ")
    assert {one.value for one in files.read(tmp_path / "again").facts if one.name != BOARD} == {shown}
    with (tmp_path / "again" / "facts.csv").open(newline="") as file:
        said = {line["value"] for line in csv.DictReader(file) if line["name"] != BOARD}
    assert said == {f"'{shown}" if shown.startswith(FORMULA) else shown}


def test_a_trace_from_before_the_mark_is_read_as_it_was_written(tmp_path):
    """Its header does not speak of marks, and a text that began with one keeps it."""
    folder = export_field_run(tmp_path)
    header = msgspec.json.decode((folder / FILE).read_bytes())
    assert header.pop("marked") is True
    (folder / FILE).write_bytes(msgspec.json.encode(header))
    first, *rest = files.read(folder).facts
    path = folder / "facts.csv"
    path.write_text(path.read_text().replace(f",{first.value}\n", ",'quoted'\n", 1))
    assert [one.value for one in files.read(folder).facts] == ["'quoted'", *(one.value for one in rest)]
