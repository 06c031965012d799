"""Truncated journal: the run continues from its newest intact state."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch

from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.records import (
    AnyRecord,
    Noted,
    Rewound,
    RoundClosed,
    RoundOpened,
    RunOpened,
    UpdateAccepted,
    closed_rounds,
)
from edge_server.journal.runs import checkpoint_path, find_unfinished, require_journal
from edge_server.journal.sqlite import JOURNAL, read_records
from edge_server.plan.plan import Plan
from edge_server.rounds.check_plan import load
from edge_server.rounds.resume import Resumption, resume
from shared.errors import ConfigError
from shared.protocol.messages import Assignment, Hyper, Update
from shared.tensors.tree import State
from tests.edge_server.fleets import Network, Site, Stopping
from tests.edge_server.harness import RUN, write_plan
from tests.edge_server.rounds.test_resume_run import make_plan
from tests.edge_server.textbook import NAMES
from tests.naming import names_all, naming

ROUNDS, DEVICES, TEARS = 9, ("a", "b"), int(os.environ.get("TEARS", "60"))
WAL = f"{JOURNAL}-wal"


def state(number: int) -> State:
    return State({"w": torch.full((40,), float(number))})


def write_round(store: SqliteStore, number: int, *, opened_only: bool = False) -> None:
    """Record a round as a server does."""
    assignments = {device: Assignment(seed=1, hyper=Hyper()) for device in DEVICES}
    store.append(RoundOpened(round=number, assignments=assignments))
    if opened_only:
        return
    for device in DEVICES:
        update = Update(run=RUN, round=number, device=device, params=None)
        store.append(UpdateAccepted(round=number, device=device, update=update, bytes_up=1))
    store.save(number, state(number))
    store.append(RoundClosed(round=number, outcome="aggregated", arrived=DEVICES, seconds=1.0))


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> Plan:
    folder = tmp_path_factory.mktemp("plan")
    return load(write_plan(folder, rounds=20), folder)


@pytest.fixture(scope="module", params=[True, False], ids=["the log taken over each round", "all of it in the log"])
def run(request, plan, tmp_path_factory) -> Path:
    """Return the folder of a run as it is while its server is at work in round 10."""
    folder = tmp_path_factory.mktemp("run") / RUN
    copy = folder.with_name("copy")
    store = SqliteStore(folder, durable=request.param)
    store.append(RunOpened(run=RUN, plan=plan, started="20261122T000000Z"))
    for number in range(1, ROUNDS + 1):
        write_round(store, number)
    write_round(store, ROUNDS + 1, opened_only=True)
    store.settle()
    shutil.copytree(folder, copy)
    store.close()
    (copy / f"{JOURNAL}-shm").unlink()
    return copy


def cut(path: Path, random: Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: random.randrange(len(data))])


def flip(path: Path, random: Random) -> None:
    data = bytearray(path.read_bytes())
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    path.write_bytes(data)


def drop_rows(place: Path, random: Random) -> None:
    with sqlite3.connect(place / JOURNAL) as connection:
        connection.execute(
            "DELETE FROM records WHERE rowid > (SELECT max(rowid) - ? FROM records)", [random.randrange(30)]
        )
    connection.close()


TEAR: list[Callable[[Path, Random], None]] = [
    lambda place, random: cut(place / WAL, random),
    lambda place, random: flip(place / WAL, random),
    lambda place, random: (place / WAL).unlink(),
    lambda place, random: cut(place / JOURNAL, random),
    lambda place, random: flip(place / JOURNAL, random),
    drop_rows,
    lambda place, random: (place / JOURNAL).write_bytes((place / JOURNAL).read_bytes()[: random.randrange(1024)]),
]


def go_on(place: Path) -> tuple[Resumption, list[AnyRecord]] | None:
    """Open a run's folder as its server does; return where the run stands, and its record; None where it refuses."""
    store = SqliteStore(place, durable=False)
    try:
        if not store.records():
            with pytest.raises(ConfigError, match=naming(store.folder, ROUNDS, JOURNAL)):
                require_journal(store.folder)
            return None
        return resume(store, lambda: state(0)), store.records()
    finally:
        store.close()


def test_a_journal_torn_anywhere_costs_no_round_that_is_not_lost_and_is_never_silent(run, tmp_path, caplog):
    """Cut or changed at any byte, without its log, without its last rows; TEARS=1000 for as many seeds."""
    caplog.set_level(logging.CRITICAL)
    refused = restored = 0
    for seed in range(TEARS):
        place, random = tmp_path / "torn", Random(seed)
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(run, place)
        TEAR[seed % len(TEAR)](place, random)
        if (found := go_on(place)) is None:
            refused += 1
            continue
        at, records = found
        closed = closed_rounds(records)
        known = [one.round for one in closed if not one.restored]
        notes = [one.what for one in records if isinstance(one, Noted)]
        assert known == list(range(1, len(known) + 1)), seed
        restored += len(closed) > len(known)
        if at.number == ROUNDS + 1:
            assert torch.equal(at.state.tree["w"], state(ROUNDS).tree["w"]), seed
            assert (len(known) == ROUNDS) != any(names_all(note, ROUNDS) for note in notes)
        else:
            assert (at.number, len(known)) == (ROUNDS, ROUNDS - 1), "the one round whose end was lost, no other"
            assert at.open_round, seed
    assert refused
    assert restored


def test_a_run_without_a_journal_is_refused_and_its_states_stay(tmp_path, plan, run):
    """It began at 1 without a word and overwrote them; so did the same command under another name."""
    name = "tiny-20261122T000000Z-0123"
    place = tmp_path / name
    for content in (None, b""):
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(run, place)
        (place / WAL).unlink()
        (place / JOURNAL).unlink() if content is None else (place / JOURNAL).write_bytes(content)
        assert go_on(place) is None
        with pytest.raises(ConfigError, match=naming(place)):
            find_unfinished(tmp_path, plan)
        assert torch.equal(SqliteStore(place).load(ROUNDS).tree["w"], state(ROUNDS).tree["w"])


@pytest.mark.parametrize("kind", ["good", "best"])
def test_a_run_whose_journal_and_last_states_are_cut_resumes_from_the_newest_intact_one(tmp_path, plan, kind):
    """It began at round 1, although the last good or the most accurate state lay whole beside them."""
    store = SqliteStore(tmp_path / RUN)
    store.append(RunOpened(run=RUN, plan=plan))
    for number in range(1, ROUNDS + 1):
        write_round(store, number)
    store.close()
    folder = tmp_path / RUN / "checkpoints"
    with sqlite3.connect(tmp_path / RUN / JOURNAL) as connection:
        connection.execute("DELETE FROM records WHERE rowid > 6")
    connection.close()
    for path in folder.glob("round-*"):
        path.write_bytes(path.read_bytes()[:100])
    if kind == "best":
        (folder / "good.safetensors").rename(folder / f"best-{ROUNDS - 2:06d}.safetensors")
    found = go_on(tmp_path / RUN)
    assert found
    assert found[0].number == ROUNDS - 1
    assert torch.equal(found[0].state.tree["w"], state(ROUNDS - 2).tree["w"])


def test_a_run_of_which_only_the_last_good_state_is_left_is_not_begun_anew(tmp_path, plan):
    store = SqliteStore(tmp_path / RUN)
    store.append(RunOpened(run=RUN, plan=plan))
    for number in range(1, ROUNDS + 1):
        write_round(store, number)
    store.close()
    (tmp_path / RUN / JOURNAL).unlink()
    for path in (tmp_path / RUN / "checkpoints").glob("round-*"):
        path.unlink()
    with pytest.raises(ConfigError, match=naming(tmp_path / RUN)):
        require_journal(tmp_path / RUN)


def test_a_state_of_another_run_or_from_before_the_run_went_back_is_not_taken(tmp_path, plan):
    """What looks like the end that was lost may be what the run left behind."""
    store = SqliteStore(tmp_path / RUN, durable=False)
    store.append(RunOpened(run=RUN, plan=plan))
    for number in (1, 2, 3):
        write_round(store, number)
    store.append(Rewound(round=3, cause="by hand"))
    other = SqliteStore(tmp_path / "other", durable=False)
    other.append(RunOpened(run="other", plan=plan))
    other.save(7, state(7))
    shutil.copy(checkpoint_path(tmp_path / "other/checkpoints", 7), tmp_path / RUN / "checkpoints")
    other.close()
    store.close()
    found = go_on(tmp_path / RUN)
    assert found
    at, records = found
    assert (at.number, [one.round for one in closed_rounds(records)]) == (3, [1, 2])


def test_a_copy_of_the_file_is_the_run(tmp_path, plan):
    """While the server is at work, moments after a round and without the log beside it: all that ended are in it."""
    store = SqliteStore(tmp_path / RUN)
    store.append(RunOpened(run=RUN, plan=plan))
    for number in (1, 2, 3):
        write_round(store, number)
        store.settle()
        copy = tmp_path / f"copy-{number}"
        copy.mkdir()
        shutil.copy(tmp_path / RUN / JOURNAL, copy)
        assert len(closed_rounds(read_records(copy))) == number
    store.close()


def test_a_run_whose_last_rows_are_gone_ends_as_if_nothing_had_happened(tmp_path):
    """The rounds that the record lost are not trained again, and the record says which they are."""
    expected = Site(Network(), make_plan(tmp_path, rounds=4), tmp_path / "whole").play()
    here = Site(Network(), make_plan(tmp_path, rounds=4), tmp_path)

    async def play():
        async with here.devices(*NAMES):
            await here.serve_until(lambda written: isinstance(written, RoundClosed) and written.round == 3)
            with sqlite3.connect(tmp_path / RUN / JOURNAL) as connection:
                connection.execute(
                    "DELETE FROM records WHERE rowid > (SELECT rowid FROM records WHERE body LIKE ? LIMIT 1)",
                    ['%"type":"RoundClosed","round":1,%'],
                )
            connection.close()
            return await here.serve()

    end = here.network.run(play())
    assert sorted(here.trained) == [(name, n) for name in NAMES for n in range(1, 6)]  # the last is the evaluation
    assert all(torch.equal(end[0].tree[name], leaf) for name, leaf in expected[0].tree.items())
    assert [(one.round, one.restored) for one in closed_rounds(end[1])] == [(1, False), (3, True), (4, False)]
    assert names_all(next(one.what for one in end[1] if isinstance(one, Noted)), 2, 3)


@pytest.mark.parametrize("moment", [RoundClosed, UpdateAccepted], ids=["a round's end", "an update has come"])
def test_a_run_whose_folder_is_deleted_under_it_goes_on_and_its_record_is_whole(tmp_path, moment):
    """Only an update that lay there and was not yet in the model is lost, and named."""
    expected = Site(Network(), make_plan(tmp_path, rounds=4), tmp_path / "whole").play()
    here, deleted = Site(Network(), make_plan(tmp_path, rounds=4), tmp_path), list[str]()
    if moment is UpdateAccepted:  # the others come after it, and not in the same transaction
        here.held |= {(name, 2): asyncio.Event() for name in NAMES[1:]}

    def delete(written: object) -> bool:
        if isinstance(written, moment) and written.round == 2 and not deleted:
            deleted.append(getattr(written, "device", ""))
            shutil.rmtree(tmp_path / RUN)
            for event in here.held.values():
                event.set()
        return False

    async def play():
        async with here.devices(*NAMES):
            return await here.serve(Stopping(tmp_path / RUN, delete))

    state, records = here.network.run(play())
    assert records == read_records(tmp_path / RUN)
    assert [(one.round, one.outcome) for one in closed_rounds(records)] == [(n, "aggregated") for n in (1, 2, 3, 4)]
    lost = {device for device in deleted if device}
    assert closed_rounds(records)[1].failed.keys() == lost
    assert lost or all(torch.equal(state.tree[name], leaf) for name, leaf in expected[0].tree.items())
