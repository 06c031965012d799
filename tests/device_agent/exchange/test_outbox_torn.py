"""An entry cut at any byte, or with any bit flipped, is found out before the server hears of it."""

from __future__ import annotations

import shutil

import pytest

from device_agent.exchange import outbox
from shared.errors import TaskFailed
from tests.device_agent.agent_side import update_of
from tests.device_agent.sources import make, put

DATA = b"moved" * 8


@pytest.fixture
def entry(tmp_path):
    """Return a whole entry's folder and the function that tells whether the outbox still takes it for whole."""
    put(make(tmp_path), 1, DATA)
    path = tmp_path / "outbox" / "trial@000001"
    shutil.copytree(path, tmp_path / "whole")

    def is_taken() -> bool:
        box = make(tmp_path)
        box.check()
        found = box.entries()
        if not found:
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(tmp_path / "whole", path)
        return bool(found)

    assert is_taken()
    return path, is_taken


@pytest.mark.parametrize("name", [outbox.UPDATE, outbox.PAYLOAD])
def test_cut_at_every_byte(entry, name):
    """Every other one with zeros in the place of what is lost, as a file system leaves it."""
    path, is_taken = entry
    whole = (path / name).read_bytes()
    for length in range(len(whole)):
        torn = whole[:length]
        (path / name).write_bytes(torn if length % 2 else torn.ljust(len(whole), b"\0"))
        assert not is_taken(), length


@pytest.mark.parametrize("name", [outbox.UPDATE, outbox.PAYLOAD])
def test_a_bit_flipped_in_every_byte(entry, name):
    """Also where the message would still be one, of another weight."""
    path, is_taken = entry
    whole = (path / name).read_bytes()
    for place in range(len(whole)):
        rotten = bytearray(whole)
        rotten[place] ^= 1 << place % 8
        (path / name).write_bytes(rotten)
        assert not is_taken(), place


@pytest.mark.parametrize("name", [outbox.UPDATE, outbox.PAYLOAD])
def test_a_file_that_is_gone(entry, caplog, name):
    """What the device can never deliver is set aside and reported, not offered for ever."""
    path, is_taken = entry
    (path / name).unlink()
    assert not is_taken()
    assert "update trial@000001 is corrupt, set aside as .trial@000001.corrupt" in caplog.text


def test_a_state_that_is_torn_fails_one_task_and_the_next_starts_afresh(device, make_task):
    """It is set aside under a name the report gives; the update of the next task is that of a first one."""
    first = (device.perform(make_task()) / outbox.PAYLOAD).read_bytes()
    state = device.folder / "state" / "trial"
    state.write_bytes(b"torn")
    with pytest.raises(TaskFailed, match=r"set aside as trial\.corrupt-1, the next task starts afresh"):
        device.perform(make_task())
    draft = device.perform(make_task())
    assert (draft / outbox.PAYLOAD).read_bytes() == first
    assert update_of(draft).params.size == len(first)
