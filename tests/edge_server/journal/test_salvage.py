"""Damaged journal: the records before the damage form a valid earlier run."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.records import AnyRecord, RoundClosed, RunOpened
from edge_server.journal.runs import find_unfinished, summarise_runs
from edge_server.journal.sqlite import JOURNAL, read_records
from edge_server.rounds.check_plan import load
from shared.errors import CorruptFile
from tests.edge_server.harness import write_plan
from tests.naming import log_messages, naming

WAL = f"{JOURNAL}-wal"
COUNT = 12


def closing(number: int) -> RoundClosed:
    return RoundClosed(round=number, outcome="aggregated", arrived=("a", "b"), loss=0.5, seconds=float(number))


RECORDS = [closing(number) for number in range(1, COUNT + 1)]


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """Return the folder of a run whose server was killed: all but the first records lie in the write-ahead log."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    child = os.fork()
    if not child:
        store = SqliteStore(folder)
        for record in RECORDS:
            store.append(record)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    return folder


@pytest.fixture(scope="module")
def closed(tmp_path_factory) -> Path:
    """Return the folder of a run whose server ended in order: all records lie in the database."""
    folder = tmp_path_factory.mktemp("closed") / "run"
    store = SqliteStore(folder, durable=False)
    for record in RECORDS:
        store.append(record)
    store.close()
    return folder


@pytest.fixture(scope="module")
def after(tmp_path_factory):
    """Return the function that damages a file of a run and opens it; it gives what is read then, and twice."""
    place = tmp_path_factory.mktemp("damaged") / "run"

    def opened(folder: Path, name: str, damage) -> list[AnyRecord]:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(folder, place)
        (place / f"{JOURNAL}-shm").unlink(missing_ok=True)
        (place / name).write_bytes(damage((place / name).read_bytes()))
        store = SqliteStore(place, durable=False)
        try:
            found = list(store.records())
            assert found == RECORDS[: len(found)]
            store.append(closing(99))
            assert list(store.records()) == [*found, closing(99)]
        finally:
            store.close()
        assert read_records(place) == [*found, closing(99)]
        return found

    return opened


def flipped(data: bytes, bit: int) -> bytes:
    rotten = bytearray(data)
    rotten[bit // 8 % len(data)] ^= 1 << bit % 8
    return bytes(rotten)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@settings(max_examples=30, deadline=None)
@given(where=st.floats(0, 1), fill=st.booleans())
def test_a_log_cut_anywhere_loses_its_end_only(killed, after, where, fill):
    """As many records as were whole; no record that was written before one that is there is missing."""
    size = (killed / WAL).stat().st_size
    length = int(where * size)

    def cut(data: bytes) -> bytes:
        return data[:length].ljust(size, b"\0") if fill else data[:length]

    found = after(killed, WAL, cut)
    assert len(found) >= COUNT * (length - 6 * 4200) / size - 1


@settings(max_examples=30, deadline=None)
@given(bit=st.integers(0, 1 << 20))
def test_a_bit_flipped_in_the_log_is_never_a_record(killed, after, bit):
    after(killed, WAL, lambda data: flipped(data, bit))


@settings(max_examples=50, deadline=None)
@given(bit=st.integers(0, 1 << 20))
@example(bit=416)  # can be read, takes no record
@example(bit=144)  # takes itself for read-only
@example(bit=32183)  # an error of SQLite's own that is no UTF-8
@example(bit=32410)  # a column by another type, so that no row seems to be there
@example(bit=65311)  # a record that is no UTF-8
def test_a_bit_flipped_in_the_database_is_never_a_record(closed, after, bit):
    """Also in a figure of a record, which SQLite itself does not notice."""
    after(closed, JOURNAL, lambda data: flipped(data, bit))


@settings(max_examples=20, deadline=None)
@given(length=st.integers(0, 1 << 14))
def test_a_database_cut_anywhere_is_never_half_a_record(closed, after, length):
    after(closed, JOURNAL, lambda data: data[:length])


def test_one_figure_that_rotted_costs_that_record_and_the_later_ones(closed, after, caplog):
    """It is reported, and the damaged journal is kept beside the new one."""
    needle = b'"seconds":7.0'
    found = after(closed, JOURNAL, lambda data: data.replace(needle, b'"seconds":8.0'))
    assert found == RECORDS[:6]
    assert log_messages(caplog, 7, "journal.sqlite.corrupt-1")


def test_a_record_that_was_taken_out_is_missed(closed, tmp_path):
    """A journal with a hole is not a journal, however well each of its lines reads."""
    shutil.copytree(closed, tmp_path / "run")
    with sqlite3.connect(tmp_path / "run" / JOURNAL) as connection:
        connection.execute("DELETE FROM records WHERE seq = 5")
    connection.close()
    with pytest.raises(CorruptFile, match=naming(tmp_path / "run" / JOURNAL, 5)):
        read_records(tmp_path / "run")


def test_only_the_last_damaged_journals_are_kept(closed, tmp_path):
    shutil.copytree(closed, tmp_path / "run")
    for _ in range(5):
        path = tmp_path / "run" / JOURNAL
        path.write_bytes(b"noise" * 100)
        SqliteStore(tmp_path / "run", durable=False).close()
    assert len(list((tmp_path / "run").glob("*.corrupt-*"))) == 3


def test_the_same_command_goes_on_with_a_run_whose_journal_is_damaged(tmp_path):
    """It does not begin another; to look at it says what to do."""
    plan = load(write_plan(tmp_path), tmp_path)
    store = SqliteStore(tmp_path / "run", durable=False)
    store.append(RunOpened(run="run", plan=plan, started="20260101T000000Z"))
    store.append(closing(1))
    store.close()
    path = tmp_path / "run" / JOURNAL
    path.write_bytes(path.read_bytes().replace(b'"seconds":1.0', b'"seconds":2.0'))
    assert summarise_runs(tmp_path) == []
    assert find_unfinished(tmp_path, plan) == "run"
