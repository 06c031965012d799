"""The journal: in order, durable, readable while it is written, and plain about damage."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import sqlite3
import threading
from pathlib import Path

import msgspec
import pytest
import torch

from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.records import (
    AnyRecord,
    CostSettled,
    Evaluated,
    Joined,
    Left,
    Noted,
    Rewound,
    RoundClosed,
    RoundOpened,
    RunClosed,
    RunOpened,
    Sensed,
    ServerBegan,
    UpdateAccepted,
    closed_rounds,
    drop_void,
)
from edge_server.journal.sqlite import JOURNAL, read_records
from edge_server.rounds.check_plan import load
from shared.errors import ConfigError, CorruptFile, Unrecordable, Unwritable
from shared.protocol.measurements import Cost, Provenance
from shared.protocol.messages import Assignment, Hyper, Transfer, Update
from shared.protocol.payload import digest
from shared.tensors.tree import State
from tests.edge_server.harness import write_plan
from tests.naming import log_messages, naming


def one_of_each(folder: Path) -> list[AnyRecord]:
    """Return every kind of record, with every field filled."""
    told = Assignment(seed=2**62, hyper=Hyper(momentum=0.9), values={"bits": 4, "ratio": 0.5, "keep": [1, 2]})
    update = Update(
        run="run",
        round=1,
        device="a",
        params=Transfer(digest=bytes(range(16)), size=9, frame_bytes=1024),
        weight=3.0,
        num_examples=3,
        loss=0.1 + 0.2,
        metrics={"eval_accuracy": 1 / 3},
        cost=Cost(download_s=1e-9),
    )
    return [
        RunOpened(run="run", plan=load(write_plan(folder), folder), started="20260101T000000Z"),
        ServerBegan(at=1 / 3, run_s=0.1, utc_s=1.7e9, versions={"torch": "2.4"}),
        Joined(device="a", at=0.1 + 0.2, cause="restarted", version="0.1.0"),
        Left(device="a", at=1 / 7, cause="unheard"),
        Sensed(
            device="a",
            at=2.5,
            readings={"cpu.f_hertz": 1.5e9},
            ages={"cpu.f_hertz": 1 / 3},
            provenance={"cpu.f_hertz": Provenance(source="sysfs", quality="measured", uncertainty=0.1)},
            board="orin",
            facts={"mode": "15W"},
        ),
        Noted(what="a gap"),
        RoundOpened(round=1, assignments={"a": told}, at=1 / 9, online=3),
        UpdateAccepted(round=1, device="a", update=update, bytes_up=7, at=0.7),
        CostSettled(round=1, device="a", cost=Cost(upload_s=0.25, upload_joules=1 / 3)),
        RoundClosed(
            round=1,
            outcome="aggregated",
            arrived=("a",),
            failed={"b": "no memory"},
            refused={"checksum": 2},
            loss=0.5,
            seconds=1.5,
            at=0.3,
        ),
        Rewound(round=1, cause="lost"),
        Evaluated(accuracy=None, by_device={"a": {"eval_loss": 2.0}}),
        RunClosed(outcome="stopped", cause="why"),
    ]


def closing(number: int) -> RoundClosed:
    """Return the end of a round."""
    return RoundClosed(round=number, outcome="aggregated", arrived=(), seconds=0.0)


@pytest.fixture
def store(tmp_path):
    opened = SqliteStore(tmp_path / "run")
    yield opened
    opened.close()


def test_every_record_comes_back_as_it_was_in_order_and_after_reopening(tmp_path, store):
    """Figures to the last bit; the export holds one line each."""
    written = one_of_each(tmp_path)
    for record in written:
        store.append(record)
    assert list(store.records()) == written
    assert store.export().read_bytes().count(b"\n") == len(written)
    store.close()
    again = SqliteStore(tmp_path / "run")
    assert list(again.records()) == written
    again.close()
    assert read_records(tmp_path / "run") == written
    assert read_records(tmp_path / "run", after=5) == written[5:]


def test_a_reader_sees_a_prefix_while_another_thread_writes(tmp_path, store):
    """From the very first moment of the file, and never a record out of order, twice or half."""
    enough = threading.Event()

    def write() -> None:
        for number in itertools.count(1):
            store.append(closing(number))
            if enough.is_set():
                break

    writer = threading.Thread(target=write)
    writer.start()
    lengths, seen = set[int](), list[int]()
    while len(lengths) < 3 or len(seen) < 100:
        seen += [record.round for record in read_records(tmp_path / "run", after=len(seen))]
        lengths.add(len(seen))
    enough.set()
    writer.join()
    assert seen == list(range(1, len(seen) + 1))


def test_a_journal_that_is_just_being_made_is_empty_not_corrupt(tmp_path):
    """A follower polls from the moment the file exists, which is before its table does."""
    stop, folder = threading.Event(), [tmp_path / "0"]
    faults: list[Exception] = []

    def follow() -> None:
        while not stop.is_set():
            if (folder[0] / JOURNAL).exists():
                try:
                    assert read_records(folder[0]) == []
                except (CorruptFile, AssertionError) as error:
                    faults.append(error)

    reader = threading.Thread(target=follow)
    reader.start()
    for number in range(40):
        folder[0] = tmp_path / str(number)
        SqliteStore(folder[0]).close()
    stop.set()
    reader.join()
    assert not faults


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_killed_writer_leaves_everything_it_appended(tmp_path):
    """kill -9 between two appends loses nothing that `append` returned from."""
    child = os.fork()
    if not child:
        store = SqliteStore(tmp_path / "run")
        for number in range(5):
            store.append(Rewound(round=number, cause="x"))
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert [record.round for record in read_records(tmp_path / "run")] == list(range(5))
    again = SqliteStore(tmp_path / "run")
    again.append(Rewound(round=5, cause="x"))
    assert len(again.records()) == 6
    again.close()


@pytest.mark.parametrize("damage", ["noise", "cut", "holes"])
def test_a_torn_database_is_told_by_its_path(tmp_path, damage, caplog):
    """A reader refuses it; the server sets it aside and goes on from what is whole. No traceback of sqlite's."""
    folder = tmp_path / "run"
    store = SqliteStore(folder, durable=False)
    for number in range(200):
        store.append(closing(number))
    store.close()
    path = folder / JOURNAL
    whole = path.read_bytes()
    path.write_bytes(
        {
            "noise": b"\x00noise" * 500,
            "cut": whole[: len(whole) // 2],
            "holes": whole[:100] + bytes(4000) + whole[4100:],
        }[damage]
    )
    with pytest.raises(CorruptFile, match=JOURNAL):
        read_records(folder)

    opened = SqliteStore(folder)
    found = list(opened.records())
    opened.close()
    assert found == [closing(number) for number in range(len(found))]
    assert len(found) < 200
    assert f"{path}: " in caplog.text
    assert (folder / f"{JOURNAL}.corrupt-1").exists()


def test_a_rewind_voids_rounds_and_nothing_else():
    """What was recorded of the round and later ones before the line does not count; what came after it does."""
    before = [closing(1), closing(2), RoundOpened(round=3, assignments={}), closing(3)]
    after = [Rewound(round=2, cause="lost"), RoundOpened(round=2, assignments={}), closing(2)]
    assert drop_void([*before, *after]) == [closing(1), *after]
    assert [closed.round for closed in closed_rounds([*before, *after])] == [1, 2]
    twice = [*before, *after, closing(3), Rewound(round=1, cause="lost"), closing(1)]
    assert [closed.round for closed in closed_rounds(twice)] == [1]


def test_a_state_is_kept_beside_the_journal(store):
    """Tensors and facts, to the last bit."""
    state = State({"w": torch.randn(3, 4)}, {"momentum": 0.1 + 0.2, "who": "a"})
    store.save(1, state)
    found = store.load(1)
    assert torch.equal(found.tree["w"], state.tree["w"])
    assert found.facts == state.facts


def test_rounds_without_an_accuracy_by_class_are_the_bytes_of_before():
    """And come back without one; of a class without examples there is a null."""
    record = closing(1)
    assert b"class_accuracy" not in msgspec.json.encode(record)
    assert b"terms" not in msgspec.json.encode(record)
    tested = msgspec.structs.replace(record, class_accuracy=(0.5, None), terms={"clustering_loss": 0.5})
    assert msgspec.json.decode(msgspec.json.encode(tested), type=RoundClosed) == tested
    assert msgspec.json.decode(msgspec.json.encode(record), type=RoundClosed) == record


@pytest.mark.parametrize("gone", ["the folder", "the file alone"])
def test_a_journal_that_is_deleted_under_its_writer_is_written_anew_with_every_record(tmp_path, caplog, gone):
    """It was written on into the deleted file without a word; then the run could not go on after a restart."""
    written = one_of_each(tmp_path)
    store = SqliteStore(tmp_path / "run")
    for record in written[:-2]:
        store.append(record)
    shutil.rmtree(tmp_path / "run") if gone == "the folder" else (tmp_path / "run" / JOURNAL).unlink()
    store.append(written[-2])
    assert read_records(tmp_path / "run") == written[:-1] == list(store.records())
    shutil.rmtree(tmp_path / "run")
    store.extend(written[-1:])
    store.close()
    assert read_records(tmp_path / "run") == written
    assert not list((tmp_path / "run").glob("*.part"))
    assert log_messages(caplog, tmp_path / "run" / JOURNAL, len(written) - 1)


def test_a_journal_that_another_process_put_in_its_place_is_not_written_beside(tmp_path):
    """Two servers of one folder would each have half of the record: the one whose file is gone ends."""
    written = one_of_each(tmp_path)
    store = SqliteStore(tmp_path / "run")
    store.append(written[0])
    shutil.rmtree(tmp_path / "run")
    other = SqliteStore(tmp_path / "run")
    other.append(written[0])
    with pytest.raises(ConfigError, match=naming(tmp_path / "run" / JOURNAL)):
        store.append(written[1])
    other.append(written[2])
    assert read_records(tmp_path / "run") == [written[0], written[2]]
    other.close()


def accept_small(number: int, device: str = "a") -> tuple[UpdateAccepted, bytes, Transfer]:
    """Return the record of an accepted update, its payload, and the transfer that names it."""
    content = bytes([number]) * 5000
    params = Transfer(digest=digest([memoryview(content)]), size=len(content), frame_bytes=1024)
    update = Update(run="run", round=number, device=device, params=params)
    return UpdateAccepted(round=number, device=device, update=update, bytes_up=5000), content, params


@pytest.mark.parametrize("harm", ["deleted", "damaged record", "damaged table of payloads"])
def test_small_payloads_survive_the_loss_of_their_journal(tmp_path, harm):
    """Their devices have been told that they are stored. Of a table that is of no use, no payload is read."""
    first, content, params = accept_small(1)
    second, _, _ = accept_small(2, "b")
    store = SqliteStore(tmp_path)
    store.extend([first], {"a": content})
    store.append(second)
    if harm == "deleted":
        (tmp_path / JOURNAL).unlink()
        store.append(closing(1))
        assert store.read_payload("a", params) == content
    store.close()
    with contextlib.closing(sqlite3.connect(tmp_path / JOURNAL)) as connection, connection:
        if harm == "damaged record":
            connection.execute("UPDATE records SET mark = 7 WHERE rowid = 2")
        if harm == "damaged table of payloads":
            connection.execute("PRAGMA writable_schema = ON")
            connection.execute("UPDATE sqlite_master SET sql = replace(sql, 'body', 'bodx') WHERE name = 'payloads'")
    store = SqliteStore(tmp_path)
    assert list(store.records())[:1] == [first]
    if harm == "damaged table of payloads":
        with pytest.raises(FileNotFoundError):
            store.read_payload("a", params)
        store.extend([first], {"a": content})
    assert store.read_payload("a", params) == content
    store.close()


def test_a_damaged_small_payload_is_not_replaced_by_a_file_of_another_update(tmp_path):
    """The file of a device is that of an earlier round, or even of another device, whose file it took over."""
    record, content, params = accept_small(1)
    store = SqliteStore(tmp_path)
    store.extend([record], {"a": content})
    store.updates.mkdir()
    (store.updates / "a").write_bytes(bytes([2]) * 5000)
    assert store.read_payload("a", params) == content
    with contextlib.closing(sqlite3.connect(tmp_path / JOURNAL)) as connection, connection:
        connection.execute("UPDATE payloads SET body = 7")
    with pytest.raises(FileNotFoundError):
        store.read_payload("a", params)
    (store.updates / "a").write_bytes(content)  # received in frames
    assert store.read_payload("a", params) == content
    store.close()


@pytest.mark.parametrize("durable", [True, False])
def test_a_small_payload_is_stored_with_its_record_until_the_run_ends(tmp_path, durable):
    """The next update of a device replaces it; of a server that was killed, it is there; then no file has its bytes."""
    (first, second), contents, transfers = zip(*map(accept_small, (1, 2)), strict=True)
    store = SqliteStore(tmp_path, durable=durable)
    store.extend([first], {"a": contents[0]})
    assert store.read_payload("a", transfers[0]) == contents[0]
    store.extend([second], {"a": contents[1]})
    store.close()
    store = SqliteStore(tmp_path, durable=durable)
    assert store.read_payload("a", transfers[1]) == contents[1]
    assert store.records() == [first, second]
    with pytest.raises(FileNotFoundError):
        store.read_payload("b", transfers[1])
    store.append(RunClosed(outcome="finished"))
    store.close()
    if durable:
        assert not any(data[:100] in path.read_bytes() for path in tmp_path.rglob("*.*") for data in contents)


def test_an_interrupt_reaches_the_records_that_other_threads_write_with_it(tmp_path):
    """Ctrl-C in one thread's write: the other's record is reported as not written, and can be added again."""
    store = SqliteStore(tmp_path)
    errors = list[Unwritable]()

    class Interrupting(dict):
        def items(self):
            raise KeyboardInterrupt

    def add():
        try:
            store.append(closing(1))
        except Unwritable as error:
            errors.append(error)

    with store.lock:  # both threads queue before either writes
        other = threading.Thread(target=add)
        other.start()
        while not store.waiting:
            other.join(0.01)
        with pytest.raises(KeyboardInterrupt):
            store.extend((closing(2),), Interrupting())
    other.join()
    assert len(errors) == 1
    store.append(closing(1))
    assert list(store.records()) == [closing(1)]


def test_records_that_may_wait_are_written_with_the_next_ones(tmp_path):
    """At the latest when the log is copied; this process reads them at once."""
    store = SqliteStore(tmp_path)
    closed = [closing(number) for number in (1, 2, 3)]
    store.extend(closed[:1], may_wait=True)
    store.append(closed[1])
    assert read_records(tmp_path) == closed[:2]
    store.extend(closed[2:], may_wait=True)
    assert store.records() == closed
    store.extend([closing(4)], may_wait=True)
    store.settle()
    assert read_records(tmp_path) == [*closed, closing(4)]
    store.extend([closing(5)], may_wait=True)
    store.close()
    assert read_records(tmp_path) == [*closed, closing(4), closing(5)]


def test_many_threads_write_at_once(tmp_path):
    """Each call returns after its records are written, in its order; one that cannot be recorded harms no other."""
    store, refused = SqliteStore(tmp_path), list[int]()

    def write(thread: int) -> None:
        for number in range(20):
            seconds = float("nan") if (thread, number) == (3, 7) else 1.0
            record = RoundClosed(round=100 * thread + number, outcome="missed", arrived=(), seconds=seconds)
            try:
                store.append(record)
            except Unrecordable:
                refused.append(record.round)
            else:
                assert record in list(read_records(tmp_path))

    threads = [threading.Thread(target=write, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rounds = [record.round for record in store.records()]
    assert refused == [307]
    assert sorted(rounds) == sorted({100 * thread + number for thread in range(8) for number in range(20)} - {307})
    assert all(rounds.index(one) < rounds.index(one + 1) for one in rounds if one % 100 < 19 and one not in (306, 307))
    store.close()
