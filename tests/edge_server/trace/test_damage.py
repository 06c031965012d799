"""Whatever happens to a trace's files: an error of ours, or a trace that is sound; never a traceback."""

from __future__ import annotations

import shutil
import tempfile
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_server.journal import sqlite
from edge_server.trace import files
from edge_server.trace.import_run import records_of
from shared.errors import ConfigError
from tests.edge_server.trace.test_round_trip import export_field_run

NAMES = (
    "trace.json",
    "tasks.csv",
    "steps.csv",
    "rounds.csv",
    "decisions.csv",
    "readings.csv",
    "facts.csv",
    "availability.csv",
)
SPLICES = st.sampled_from(
    [b"", b",", b"\n", b'"', b"-", b"nan", b"1e999", b"\x00", b"\xff", b"\r", b"{}", b"[]", b"null", b"9" * 30, b"e9"]
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return export_field_run(tmp_path_factory.mktemp("whole"))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(NAMES),
    start=st.floats(0, 1),
    length=st.integers(0, 12),
    splice=SPLICES | st.binary(max_size=4),
)
def test_a_damaged_trace_is_an_error_or_sound(whole, name, start, length, splice):
    """What is read can be written as a journal, and that be read."""
    with tempfile.TemporaryDirectory() as place:
        folder = shutil.copytree(whole, Path(place) / "trace")
        data = (folder / name).read_bytes()
        place_ = int(start * len(data))
        (folder / name).write_bytes(data[:place_] + splice + data[place_ + length :])
        try:
            trace = files.read(folder)
        except ConfigError as error:
            assert str(error).startswith(str(folder))  # noqa: PT017 - it names the place
            return
        bodies = [sqlite.encode(record) for record in records_of(trace)]
        marks = list(accumulate(bodies, lambda before, body: sqlite.row_mark(body, before), initial=0))
        marked = zip(bodies, marks[1:], strict=True)
        assert [sqlite.encode(record) for record in sqlite.decode(marked)] == bodies
