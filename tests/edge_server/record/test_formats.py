"""Public formats of a split run and of a field trial, byte for byte as earlier versions wrote them."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from edge_server.journal.sqlite import SqliteJournal, read_records
from edge_server.record.rows import TABLES
from edge_server.replay.trace import files
from edge_server.replay.trace.export import trace_of
from edge_server.report.csv_export import csv_text
from edge_server.report.json_export import json_text
from edge_server.report.summarise import digest_run
from tests.edge_server.report.journals import field_run
from tests.edge_server.report.test_split_runs import split_run

FIXTURES = Path(__file__).parents[2] / "fixtures" / "record"


@pytest.mark.parametrize("name", ["cut", "field"])
def test_trace_csv_and_json_have_the_same_bytes_as_before(name, tmp_path):
    """A late task and a split session; a failed task, a restart, a rewind, readings and facts."""
    (tmp_path / "plan").mkdir()
    with closing(SqliteJournal(tmp_path / "run")) as store:  # which sorts keys
        store.extend(split_run() if name == "cut" else field_run(tmp_path / "plan"))
    records = read_records(tmp_path / "run")
    files.write(trace_of(records), tmp_path / "trace")
    for table in TABLES:
        expected = (FIXTURES / name / f"{table}.csv").read_bytes()
        assert (tmp_path / "trace" / f"{table}.csv").read_bytes() == expected, table
    runs = [digest_run(records)]
    assert "".join(csv_text(runs)) == (FIXTURES / name / "report.csv").read_text()
    content = json.loads("".join(json_text(runs)))
    del content["runs"][0]["plan"]
    expected_json = (FIXTURES / name / "report.json").read_text()
    assert content == json.loads(expected_json)
    assert json.dumps(content) + "\n" == expected_json, "in the same order"
