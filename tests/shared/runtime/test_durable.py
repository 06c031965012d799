"""What a disk refuses is told with the place, the room that is left, and what to do."""

from __future__ import annotations

import errno
import os
import resource
import time

import pytest

from shared.errors import Unwritable
from shared.runtime.durable import drop_oldest, explain_disk_errors, replace_file
from tests.naming import names_all, naming


def test_a_full_disk(disk):
    disk.fill()
    with pytest.raises(Unwritable) as told, explain_disk_errors(disk.path / "entry"):
        (disk.path / "file").write_bytes(b"x")
    assert names_all(told.value, disk.path / "entry", os.strerror(errno.ENOSPC), "0.0 MiB")


def test_a_disk_that_is_read_only(disk):
    disk.read_only(yes=True)
    told = naming(disk.path, os.strerror(errno.EROFS), "4.0 MiB")
    with pytest.raises(Unwritable, match=told), explain_disk_errors(disk.path):
        (disk.path / "file").write_bytes(b"x")


def test_a_limit_of_file_sizes(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with (
            pytest.raises(Unwritable, match=naming(tmp_path, os.strerror(errno.EFBIG), "MiB")),
            explain_disk_errors(tmp_path),
        ):
            (tmp_path / "file").write_bytes(bytes(1001))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_no_room_would_mend_is_left_as_it_is(tmp_path):
    """A missing file, a folder in a file's place: an operator who makes room would be sent the wrong way."""
    with pytest.raises(IsADirectoryError), explain_disk_errors(tmp_path):
        tmp_path.write_bytes(b"x")
    with pytest.raises(FileNotFoundError), explain_disk_errors(tmp_path):
        (tmp_path / "absent").read_bytes()


def test_an_explanation_is_not_explained_again(tmp_path):
    first = Unwritable("where it happened")
    with pytest.raises(Unwritable) as told, explain_disk_errors(tmp_path):
        raise first
    assert told.value is first


def test_of_what_was_set_aside_the_newest_few_stay(tmp_path):
    """By when it was renamed, whatever its name; folders and files alike."""
    for number in (5, 3, 4, 1, 2):
        path = tmp_path / f"new-{number}"
        path.mkdir() if number % 2 else path.touch()
        if number % 2:
            (path / "content").touch()
        path.rename(tmp_path / f"old-{number}")
        time.sleep(0.02)  # noqa: TID251 - the file system's clock ticks
    drop_oldest(tmp_path.glob("old-*"), keep=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old-1", "old-2", "old-4"]


def test_a_file_is_replaced_whole_over_what_a_crash_left(tmp_path):
    path = tmp_path / "record.json"
    (tmp_path / ".record.json.part").write_bytes(b"cut short by a crash")
    for content in (b"old", b"newer"):
        replace_file(path, content)
    assert path.read_bytes() == b"newer"
    replace_file(path, b"last", durable=False, concurrent=True)
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("record.json", b"last")]


def test_where_the_disk_takes_nothing_the_old_content_stays_and_nothing_else(disk):
    path = disk.path / "record.json"
    replace_file(path, b"old")
    disk.fill()
    with pytest.raises(Unwritable, match=os.strerror(errno.ENOSPC)):
        replace_file(path, bytes(1 << 16))
    assert path.read_bytes() == b"old"
    assert not list(disk.path.glob(".record*"))


def test_a_secret_is_never_readable_to_others(tmp_path, monkeypatch):
    """Not what a crash left of it either."""
    (tmp_path / ".key.part").write_bytes(b"left")
    (tmp_path / ".key.part").chmod(0o666)
    modes = []
    monkeypatch.setattr("shared.runtime.durable.sync", lambda path: modes.append(path.stat().st_mode & 0o777))
    replace_file(tmp_path / "key", b"secret", mode=0o600)
    assert modes[0] == (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "key").read_bytes() == b"secret"
