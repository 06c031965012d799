"""Outbox on a failing disk: clear error, no partial file, no lost update."""

from __future__ import annotations

import errno
import logging
import os

import pytest

from device_agent.exchange import outbox
from device_agent.exchange.outbox import Outbox
from shared.errors import TaskFailed, Unwritable
from shared.protocol.messages import Update
from tests.device_agent.agent_side import update_of
from tests.device_agent.server_side import BYTES, make, put
from tests.naming import names_all, naming


def waiting(box: Outbox) -> list[int]:
    box.check()
    return [entry.update.round for entry in box.entries()]


def failure(number: int) -> Update:
    return Update(run="trial", round=number, device="board", params=None, failure="why")


def test_a_payload_that_does_not_fit_is_an_error_and_the_others_wait_on(disk):
    """The half of it that was written makes room for the report; later the same round works."""
    box = make(disk.path)
    put(box, 1)
    put(box, 2)
    disk.fill(leave_bytes=1 << 19)
    with pytest.raises(Unwritable, match=naming("000003", os.strerror(errno.ENOSPC), "0.0 MiB")):
        put(box, 3)
    box.add(failure(3))
    assert waiting(box) == waiting(make(disk.path)) == [1, 2, 3]
    disk.make_room()
    put(box, 3)
    assert waiting(box) == [1, 2, 3]
    assert box.entries()[2].payload.read_bytes() == BYTES


def test_a_report_that_does_not_fit_is_an_error(disk):
    box = make(disk.path)
    put(box, 1)
    disk.fill()
    with pytest.raises(Unwritable, match=os.strerror(errno.ENOSPC)):
        box.add(failure(2))
    assert waiting(box) == [1]
    disk.make_room()
    box.add(failure(2))
    assert waiting(box) == [1, 2]


def test_a_read_only_disk_stops_writing_and_not_reading(disk, caplog):
    """What waits is offered; what is settled stays, is told, and goes once the disk takes writes again."""
    box = make(disk.path)
    put(box, 1, state=b"after round 1")
    disk.read_only(yes=True)
    box = make(disk.path)
    with pytest.raises(Unwritable):
        box.draft("trial", 2)
    [entry] = box.entries()
    box.remove(entry)
    assert names_all(caplog.text, "trial@000001", os.strerror(errno.EROFS))
    assert waiting(box) == [1]
    disk.read_only(yes=False)
    box.remove(entry)
    assert waiting(box) == []
    assert (disk.path / "state" / "trial").read_bytes() == b"after round 1"


def test_a_state_that_cannot_be_taken_over_stays_with_its_update(disk, caplog):
    """Killed before it took the state over, restarted on a read-only disk: it lives; the next task has the state."""
    box = make(disk.path)
    draft = box.draft("trial", 1)
    (draft / outbox.STATE).write_bytes(b"after round 1")
    outbox.write(draft, Update(run="trial", round=1, device="board", params=None))
    outbox.commit(draft)
    disk.read_only(yes=True)
    with caplog.at_level(logging.WARNING):
        box = make(disk.path)
    [told] = [record.getMessage() for record in caplog.records]
    assert names_all(told, os.strerror(errno.EROFS))
    disk.read_only(yes=False)
    box.draft("trial", 2)
    assert (disk.path / "state" / "trial").read_bytes() == b"after round 1"


def test_what_waits_is_bounded_by_failing_the_next_task(tmp_path):
    """Not one byte more than the limit, and no update goes for another; settled ones make room."""
    box = make(tmp_path, limit=2 << 20)
    box.reserve(1 << 20)
    put(box, 1)
    room = (2 << 20) - sum(file.stat().st_size for file in box.entries()[0].path.iterdir())
    box.reserve(room)
    with pytest.raises(TaskFailed, match=naming(tmp_path / "outbox", "1.0 MiB", "outbox_mb", 2)):
        box.reserve(room + 1)
    assert waiting(box) == [1]
    box.remove(box.entries()[0])
    box.reserve(1 << 20)


def test_reports_are_dropped_oldest_first_and_updates_never(disk):
    """Two updates and as many reports as may wait; the next three reports cost the three oldest ones."""
    box = make(disk.path)
    for number in (1, 4):
        put(box, number, b"moved")
    reports = [2, 3, *range(5, outbox.REPORTS + 6)]
    for number in reports:
        box.add(failure(number))
    assert waiting(box) == sorted([1, 4, *reports[3:]])


def test_only_the_last_corrupt_entries_are_kept(tmp_path):
    box = make(tmp_path)
    for number in range(1, 7):
        put(box, number, b"moved")
        (tmp_path / "outbox" / f"trial@{number:06d}" / outbox.UPDATE).write_bytes(b"rotten")
        assert box.entries() == []
    aside = sorted(path.name for path in (tmp_path / "outbox").glob(".*.corrupt"))
    assert aside == [f".trial@{number:06d}.corrupt" for number in (4, 5, 6)]


def test_an_update_that_cannot_be_read_at_the_moment_is_not_given_up(tmp_path, caplog):
    """Too many open files are no reason to lose what a night of training gave."""
    box = make(tmp_path)
    put(box, 1, b"moved")
    update = tmp_path / "outbox" / "trial@000001" / outbox.UPDATE
    update.rename(update.with_name("meanwhile"))
    update.symlink_to(update)  # opening it fails, and not because it is absent
    assert box.entries() == []
    assert names_all(caplog.text, "trial@000001", os.strerror(errno.ELOOP))
    update.unlink()
    update.with_name("meanwhile").rename(update)
    assert waiting(box) == [1]


@pytest.mark.parametrize("name", [outbox.UPDATE, outbox.PAYLOAD])
def test_an_entry_without_one_of_its_files_is_set_aside(tmp_path, caplog, name):
    """What the device can never deliver is reported, not offered for ever; torn files are in the table of damage."""
    put(make(tmp_path), 1)
    (tmp_path / "outbox" / "trial@000001" / name).unlink()
    box = make(tmp_path)
    box.check()
    assert box.entries() == []
    assert names_all(caplog.text, ".trial@000001.corrupt")


def test_a_state_that_is_torn_fails_one_task_and_the_next_starts_afresh(device, make_task):
    """It is set aside under a name the report gives; the update of the next task is that of a first one."""
    first = (device.perform(make_task()) / outbox.PAYLOAD).read_bytes()
    state = device.folder / "state" / "trial"
    state.write_bytes(b"torn")
    with pytest.raises(TaskFailed, match=naming(state, "trial.corrupt-1")):
        device.perform(make_task())
    draft = device.perform(make_task())
    assert (draft / outbox.PAYLOAD).read_bytes() == first
    assert update_of(draft).params.size == len(first)
