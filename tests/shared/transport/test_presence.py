"""Session numbers increase; birth and will carry the same one."""

from __future__ import annotations

import pytest

from shared.protocol import wire
from shared.protocol.messages import Status
from shared.transport.presence import Session
from tests.machine import mounted
from tests.naming import names_all


@pytest.fixture
def counter(tmp_path):
    return tmp_path / "session"


def begin(counter, instance: str = "boot-1") -> tuple[Status, Status]:
    presence = Session(counter, "pi-4", "attic", instance).presence()
    assert presence.topic == "fieldfleet/v1/attic/pi-4/status"
    return wire.decode_as(Status, presence.birth), wire.decode_as(Status, presence.will)


def test_birth_and_will_belong_together(counter):
    """One number and one instance for both, so that a death can only end the session it belongs to."""
    birth, will = begin(counter)
    assert (birth.online, birth.state, will.online) == (True, "ready", False)
    assert (birth.device, birth.session, birth.instance) == (will.device, will.session, will.instance)
    assert (birth.device, birth.instance) == ("pi-4", "boot-1")


def test_the_number_only_grows(counter):
    """Over sessions of one process and over processes: the file remembers."""
    session = Session(counter, "pi-4", "attic", "boot-1")
    numbers = [wire.decode_as(Status, session.presence().birth).session for _ in range(3)]
    numbers += [begin(counter, f"boot-{boot}")[0].session for boot in range(2, 5)]
    assert numbers == [1, 2, 3, 4, 5, 6]


def test_the_number_is_on_disk_before_it_is_used(counter):
    """A crash right after being told a number never gives that number twice."""
    birth, _ = begin(counter)
    assert int(counter.read_text()) == birth.session
    counter.with_name(f".{counter.name}.part").write_text("of a crash while writing")
    assert begin(counter)[0].session == birth.session + 1
    assert [entry.name for entry in counter.parent.iterdir()] == ["session"]


@pytest.mark.parametrize("content", [b"", b"\0\0\0", b"twelve", b"\xff\xfe", b"-7", b"9" * 30, b"1" * 5000, b"1.5"])
def test_a_corrupt_counter_begins_again(counter, content):
    """No crash at boot, and a number that can be sent; a birth counts for the server whatever its number."""
    counter.write_bytes(content)
    assert [begin(counter)[0].session, begin(counter)[0].session] == [1, 2]


def test_the_file_may_vanish_while_the_process_lives(counter):
    """The disk is replaced under us: our own earlier death must not end us."""
    session = Session(counter, "pi-4", "attic", "boot-1")
    counter.write_text("41\n")
    session.presence()
    counter.unlink()
    assert wire.decode_as(Status, session.presence().birth).session == 43
    assert begin(counter)[0].session == 44


@pytest.fixture(params=["read-only", "full"])
def bad_disk(request, tmp_path):
    """Return a folder on a disk that is read-only, or full; it holds the count of earlier sessions."""
    with mounted(tmp_path / "disk") as disk:
        (disk.path / "session").write_text("7\n")
        disk.fill()
        if request.param == "read-only":
            disk.read_only(yes=True)
        yield disk.path


def test_a_disk_that_cannot_be_written(bad_disk, caplog):
    """Full, or read-only: the device goes on, its numbers grow from the stored one, and it says so once."""
    session = Session(bad_disk / "session", "pi-4", "attic", "boot-1")
    assert [wire.decode_as(Status, session.presence().birth).session for _ in range(3)] == [8, 9, 10]
    [said] = [record.message for record in caplog.records]
    assert names_all(said, bad_disk)
    assert (bad_disk / "session").read_text() == "7\n"


def test_a_count_that_cannot_be_read(tmp_path, caplog):
    """A folder stands where the file should: no crash, and the numbers of this process still grow."""
    (tmp_path / "session").mkdir()
    session = Session(tmp_path / "session", "pi-4", "attic", "boot-1")
    assert [wire.decode_as(Status, session.presence().birth).session for _ in range(3)] == [1, 2, 3]
    assert len(caplog.records) == 1
