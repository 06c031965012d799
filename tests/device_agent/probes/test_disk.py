"""Disk: what is left to who is not root, and no figure of the wrong disk."""

from __future__ import annotations

import os

import pytest

from device_agent.hardware.tools import LIVE_ROOT
from device_agent.probes.disk import make_probe, read
from device_agent.profile.schema import Profile
from shared.errors import NoData
from tests.machine import as_nobody, open_to_all

PROFILE = Profile(schema=1, id="test", name="test")


def test_a_file_takes_its_size_of_a_small_disk(disk):
    """4 MiB, of which a file of 1 MiB takes exactly that."""
    before = make_probe(disk.path)(LIVE_ROOT, PROFILE, 0.0).readings
    (disk.path / "file").write_bytes(bytes(1 << 20))
    after = make_probe(disk.path)(LIVE_ROOT, PROFILE, 0.0).readings
    assert before["disk.total_bytes"].value == 4 << 20
    assert before["disk.free_bytes"].value - after["disk.free_bytes"].value == 1 << 20


def test_a_full_disk_has_none_which_is_a_figure(disk):
    disk.fill()
    assert make_probe(disk.path)(LIVE_ROOT, PROFILE, 0.0).readings["disk.free_bytes"].value == 0


def test_this_machine_has_one():
    readings = read(LIVE_ROOT, PROFILE, 5.0).readings
    here = os.statvfs("/var/lib")
    assert readings["disk.total_bytes"].value == here.f_blocks * here.f_frsize
    assert 0 <= readings["disk.free_bytes"].value <= readings["disk.total_bytes"].value
    assert readings["disk.free_bytes"].at == 5.0


def test_a_recorded_board_has_none(tmp_path):
    """The disk below the recording is not the board's."""
    with pytest.raises(NoData) as caught:
        read(tmp_path, PROFILE, 0.0)
    assert caught.value.lack == "not_present"


def test_a_folder_that_is_gone_is_not_present(tmp_path):
    with pytest.raises(NoData) as caught:
        make_probe(tmp_path / "gone")(LIVE_ROOT, PROFILE, 0.0)
    assert caught.value.lack == "not_present"


def test_a_folder_we_may_not_enter_is_denied():
    with open_to_all() as root:
        (root / "closed" / "state").mkdir(parents=True)
        (root / "closed").chmod(0o700)
        with as_nobody(), pytest.raises(NoData) as caught:
            make_probe(root / "closed" / "state")(LIVE_ROOT, PROFILE, 0.0)
    assert caught.value.lack == "denied"
