"""Run store on a failing disk: clear error, no partial write, recovery."""

from __future__ import annotations

import errno
import os

import pytest
import torch

from edge_server.journal import checkpoints
from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.records import Rewound
from edge_server.journal.sqlite import JOURNAL, read_records
from shared.errors import Unwritable
from shared.tensors.tree import State
from tests.naming import naming

LARGE = State({"w": torch.ones(300_000)})


@pytest.fixture
def store(disk):
    opened = SqliteStore(disk.path / "run")
    yield opened
    opened.close()


def record(number: int) -> Rewound:
    return Rewound(round=number, cause="x" * 5000)


def test_a_record_that_does_not_fit_is_not_there(disk, store):
    """Neither for us nor for a reader; the ones before it are, and it is written once when there is room."""
    store.append(record(1))
    disk.fill()
    for _ in range(3):
        with pytest.raises(Unwritable, match=naming(JOURNAL, os.strerror(errno.ENOSPC), "0.0 MiB")):
            store.append(record(2))
    assert store.records() == [record(1)]
    disk.make_room()
    store.append(record(2))
    assert store.records() == read_records(store.folder) == [record(1), record(2)]


def test_of_several_records_all_are_there_or_none(disk, store):
    """Though there is room for the first of them; then all are written, each with a mark that covers those before."""
    store.append(record(1))
    disk.fill(leave_bytes=60_000)
    with pytest.raises(Unwritable, match=naming(os.strerror(errno.ENOSPC))):
        store.extend([record(number) for number in range(2, 40)])
    assert store.records() == [record(1)]
    disk.make_room()
    store.extend([record(2), record(3)])
    store.extend([])
    store.append(record(4))
    assert store.records() == read_records(store.folder) == [record(number) for number in (1, 2, 3, 4)]


def test_a_state_that_does_not_fit_leaves_no_half_and_the_older_ones(disk, store):
    """What was written of it does not take the room of what comes next."""
    store.save(1, LARGE)
    disk.fill(leave_bytes=500_000)
    with pytest.raises(Unwritable, match=naming("round-000002.safetensors.part", os.strerror(errno.ENOSPC))):
        store.save(2, LARGE)
    assert [path.name for path in (store.folder / "checkpoints").iterdir()] == ["round-000001.safetensors"]
    assert torch.equal(store.load(1).tree["w"], LARGE.tree["w"])
    disk.make_room()
    store.save(2, LARGE)
    assert torch.equal(store.load(2).tree["w"], LARGE.tree["w"])


def test_a_run_cannot_be_opened_on_a_full_disk(disk):
    disk.fill()
    with pytest.raises(Unwritable):
        SqliteStore(disk.path / "run")


def test_a_read_only_disk_can_be_read_and_not_written(disk):
    """Also a journal that SQLite would want to make a file beside; it is no damage, and nothing is set aside."""
    store = SqliteStore(disk.path / "run")
    store.append(record(1))
    store.save(1, LARGE)
    store.close()
    disk.read_only(yes=True)
    assert read_records(disk.path / "run") == [record(1)]
    with pytest.raises(Unwritable, match=naming(JOURNAL, os.strerror(errno.EROFS))):
        SqliteStore(disk.path / "run")
    with pytest.raises(Unwritable):
        checkpoints.save(disk.path / "run" / "checkpoints", 2, LARGE)
    disk.read_only(yes=False)
    store = SqliteStore(disk.path / "run")
    assert store.records() == [record(1)]
    store.close()


def test_states_of_rounds_that_are_void_go(tmp_path):
    """After going back to round 1, the state of round 1 is kept and not taken for the oldest of three."""
    for number in (7, 8, 1):
        checkpoints.save(tmp_path, number, State({}, {"round": number}))
    assert [path.name for path in tmp_path.glob("round-*")] == ["round-000001.safetensors"]
