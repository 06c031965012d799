"""Records read by type: equal to all records filtered, with and without an index, in both directions."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.records import (
    AnyRecord,
    CostSettled,
    Evaluated,
    Left,
    LeftOut,
    Noted,
    Rewound,
    RoundClosed,
    RoundOpened,
    RunOpened,
    UpdateAccepted,
    count_valid,
    enumerate_records,
    enumerate_valid,
    first,
)
from edge_server.journal.sqlite import JOURNAL, open_records
from edge_server.rounds.check_plan import load
from shared.errors import CorruptFile
from shared.protocol.measurements import Cost
from shared.protocol.messages import Update
from tests.edge_server.harness import write_plan

ROUNDS = 3
UPDATE = Update(run="run", round=1, device="a", params=None)
MAKE: dict[type[AnyRecord], Callable[..., AnyRecord]] = {
    RoundOpened: lambda number, _: RoundOpened(round=number, assignments={}),
    UpdateAccepted: lambda number, _: UpdateAccepted(round=number, device="a", update=UPDATE, bytes_up=1),
    CostSettled: lambda number, _: CostSettled(round=number, device="a", cost=Cost(upload_s=1.0)),
    RoundClosed: lambda number, _: make_end(number),
    Evaluated: lambda number, flag: Evaluated(accuracy=None, by_device={}, round=number if flag else None),
    Rewound: lambda number, flag: Rewound(round=number, cause="lost", reopened=flag),
    Left: lambda number, _: Left(device="a", at=float(number)),
    LeftOut: lambda number, _: LeftOut(device="a", instance="i", cause="c", round=number, at=1.0),
    Noted: lambda _, flag: Noted(what=f"note {flag}"),
}
KINDS = (RunOpened, *MAKE)
RECORDS = st.lists(
    st.tuples(st.sampled_from(list(MAKE.values())), st.integers(1, 2 * ROUNDS + 1), st.booleans()).map(
        lambda made: made[0](*made[1:])
    ),
    max_size=25,
)


def make_end(number: int) -> RoundClosed:
    return RoundClosed(round=number, outcome="aggregated", arrived=(), seconds=1.0)


@pytest.fixture(scope="module")
def opening(tmp_path_factory) -> RunOpened:
    folder = tmp_path_factory.mktemp("plan")
    return RunOpened(run="run", plan=load(write_plan(folder, rounds=ROUNDS), folder))


def write_journal(folder: Path, records: Sequence[AnyRecord], *, index: bool = True) -> Path:
    for path in folder.glob(f"{JOURNAL}*"):
        path.unlink()
    with closing(SqliteStore(folder, durable=False)) as store:
        store.extend(records)
    if not index:
        with closing(sqlite3.connect(folder / JOURNAL)) as connection:
            connection.execute("DROP INDEX rare_records")
    return folder


def drop_void(records: Sequence[AnyRecord]) -> list[tuple[int, AnyRecord]]:
    """Return the valid records as the definition of a rewind says, one rewind after the other."""
    valid = list[tuple[int, AnyRecord]]()
    for number, record in enumerate(records, 1):
        if isinstance(record, Rewound):
            valid = [entry for entry in valid if not is_void(entry[1], record)]
        valid.append((number, record))
    return valid


def is_void(record: AnyRecord, rewound: Rewound) -> bool:
    match record:
        case Evaluated():
            return record.round is not None and record.round >= rewound.round
        case RoundOpened() if rewound.reopened and record.round == rewound.round:
            return False
        case RoundOpened() | UpdateAccepted() | CostSettled() | RoundClosed():
            after = record.round - (ROUNDS + 1) if record.round > ROUNDS + 1 else record.round
            return after >= rewound.round
        case _:
            return False


@settings(max_examples=60, deadline=None)
@given(records=RECORDS, kinds=st.lists(st.sampled_from(KINDS), max_size=4), index=st.booleans(), newest=st.booleans())
def test_records_by_type_are_the_records_filtered(tmp_path_factory, opening, records, kinds, index, newest):
    """In a list, in the writer's journal and in a file that another process reads; void ones are left out alike."""
    every = [opening, *records]
    folder = write_journal(tmp_path_factory.getbasetemp() / "stream", every, index=index)
    order = reversed if newest else list

    def expected(numbered: Sequence[tuple[int, AnyRecord]]) -> list[tuple[int, AnyRecord]]:
        return list(order([entry for entry in numbered if not kinds or isinstance(entry[1], tuple(kinds))]))

    stored = open_records(folder)
    for source in (every, stored):
        assert list(enumerate_records(source, *kinds, newest_first=newest)) == expected(list(enumerate(every, 1)))
        assert list(enumerate_valid(source, *kinds, newest_first=newest)) == expected(drop_void(every))
    assert list(stored) == every
    assert [stored[index] for index in range(len(stored))] == every
    assert list(stored[3:7]) == every[3:7]
    assert list(stored[3:][1:]) == every[4:]
    for kind in KINDS:
        assert count_valid(stored, kind) == sum(isinstance(record, kind) for _, record in drop_void(every))
        assert first(stored, kind) == next((record for record in every if isinstance(record, kind)), None)


def test_a_journal_of_an_earlier_version_is_not_rewritten_until_it_is_continued(tmp_path, opening):
    """Reading changes no byte; its writer then makes the index, and reads and appends by it."""
    rounds = [make_end(number) for number in (1, 2)]
    write_journal(tmp_path, [opening, *rounds], index=False)
    before = (tmp_path / JOURNAL).read_bytes()
    stored = open_records(tmp_path)
    assert not stored.has_index
    assert [record for _, record in enumerate_records(stored, RoundClosed)] == rounds
    assert (tmp_path / JOURNAL).read_bytes() == before
    with closing(SqliteStore(tmp_path)) as store:
        store.append(make_end(3))
    stored = open_records(tmp_path)
    assert stored.has_index
    assert [record.round for _, record in enumerate_records(stored, RoundClosed)] == [1, 2, 3]


def test_an_index_that_lacks_a_record_is_found_and_made_again(tmp_path, opening):
    """A page of it as it was before a write that was lost: no record is silently missing."""
    write_journal(tmp_path, [opening, make_end(1)])
    with closing(sqlite3.connect(tmp_path / JOURNAL)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        [[page, size]] = connection.execute(
            "SELECT rootpage, page_size FROM sqlite_master, pragma_page_size WHERE name = 'rare_records'"
        ).fetchall()
    data = bytearray((tmp_path / JOURNAL).read_bytes())
    cells = (page - 1) * size + 3
    assert int.from_bytes(data[cells : cells + 2]) == 2
    data[cells : cells + 2] = (1).to_bytes(2)
    (tmp_path / JOURNAL).write_bytes(data)
    with pytest.raises(CorruptFile):
        open_records(tmp_path)
    with closing(SqliteStore(tmp_path)) as store:
        assert len(list(enumerate_records(store.records()))) == 2
    assert [record.round for _, record in enumerate_records(open_records(tmp_path), RoundClosed)] == [1]


def test_a_reader_keeps_to_the_records_that_were_there(tmp_path, opening):
    """What is written meanwhile belongs to the next look; a changed record is noticed only where it is read."""
    rounds = [make_end(number) for number in (1, 2, 3)]
    with closing(SqliteStore(tmp_path)) as store:
        store.extend([opening, *rounds[:2]])
        stored, own = open_records(tmp_path), store.records()
        store.append(rounds[2])
        assert list(stored) == list(own) == [opening, *rounds[:2]]
    assert list(own) == [opening, *rounds[:2]], "the writer has closed"
    with closing(sqlite3.connect(tmp_path / JOURNAL)) as connection, connection:
        connection.execute("UPDATE records SET body = replace(body, '1.0', '2.0') WHERE seq = 3")
    stored = open_records(tmp_path, verify=False)
    assert first(stored, RunOpened) == opening
    with pytest.raises(CorruptFile, match="record 3 "):
        list(enumerate_records(stored, RoundClosed))
    with pytest.raises(CorruptFile, match="record 3 "):
        open_records(tmp_path)
