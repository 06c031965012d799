"""One process at a time in a folder."""

import asyncio
import shutil

import pytest

from shared.errors import ConfigError
from shared.runtime import folder_lock
from shared.runtime.folder_lock import FOLDER_LOCK, hold_lock, is_held, keep_lock
from tests.machine import as_nobody, open_to_all
from tests.naming import naming


def test_a_folder_is_held_once_and_free_again_afterwards(tmp_path):
    """The second holder is told what to do; a lock is not left behind."""
    with hold_lock(tmp_path), pytest.raises(ConfigError, match=naming(tmp_path)), hold_lock(tmp_path):
        pytest.fail("two hold it")
    with hold_lock(tmp_path):
        pass


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_a_lock_that_is_deleted_is_made_anew_and_two_never_hold_the_folder(tmp_path, mode, caplog):
    """A second process that comes in between is kept out by the folder itself, where that is this user's alone."""
    folder = tmp_path / "runs"
    folder.mkdir()
    folder.chmod(mode)
    with hold_lock(folder) as lock:
        (folder / FOLDER_LOCK).unlink()
        if mode == 0o700:
            with pytest.raises(ConfigError, match=naming(folder)), hold_lock(folder):
                pytest.fail("two hold it")
            (folder / FOLDER_LOCK).unlink()
        lock.renew()
        lock.renew()
        with pytest.raises(ConfigError, match=naming(folder)), hold_lock(folder):
            pytest.fail("two hold it")
        assert [record.args for record in caplog.records] == [(folder / FOLDER_LOCK,)]
    with hold_lock(folder):
        pass


def test_who_lost_the_whole_folder_to_another_process_ends(tmp_path):
    """Or makes it anew, where nobody else has."""
    folder = tmp_path / "runs"
    folder.mkdir(mode=0o700)
    with hold_lock(folder) as lock:
        shutil.rmtree(folder)
        lock.renew()
        assert (folder / FOLDER_LOCK).exists()
        shutil.rmtree(folder)
        folder.mkdir(mode=0o700)
        with hold_lock(folder), pytest.raises(ConfigError, match=naming(folder / FOLDER_LOCK)):
            lock.renew()


async def test_a_lock_is_kept_until_somebody_else_has_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "LOOK_S", 0.01)
    with hold_lock(tmp_path) as lock:
        keeping = asyncio.create_task(keep_lock(lock))
        (tmp_path / FOLDER_LOCK).unlink()
        while not (tmp_path / FOLDER_LOCK).exists():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
        assert not keeping.done()
        tmp_path.rename(tmp_path.with_name("aside"))
        tmp_path.mkdir(mode=0o700)
        with hold_lock(tmp_path), pytest.raises(ConfigError, match=naming(tmp_path / FOLDER_LOCK)):
            await keeping


def test_a_lock_that_another_user_made_is_for_the_operator_to_give():
    """A board is calibrated by root, and its agent is somebody else."""
    with open_to_all() as folder:
        with hold_lock(folder):
            pass
        folder.chmod(0o777)
        with as_nobody(), pytest.raises(ConfigError, match="Permission denied"), hold_lock(folder):
            pytest.fail("it is not theirs")


def test_nobody_else_can_hold_it():
    """To open a file to read is enough to hold its lock; one that a version before made is closed to others too."""
    with open_to_all() as folder:
        folder.chmod(0o777)
        (folder / "lock").touch(0o644)
        with hold_lock(folder), as_nobody(), pytest.raises(PermissionError):
            (folder / "lock").open()
        assert (folder / "lock").stat().st_mode & 0o777 == 0o600


def test_whether_a_process_holds_a_folder_can_be_seen(tmp_path):
    assert not is_held(tmp_path)
    with hold_lock(tmp_path):
        assert is_held(tmp_path)
    assert not is_held(tmp_path)


def test_what_this_user_may_not_know_is_what_the_caller_says():
    """A folder that is not there is nobody's, whatever the caller says."""
    with open_to_all() as folder:
        (folder / "lock").touch(0o600)
        with as_nobody():
            assert is_held(folder, unknown=True)
            assert not is_held(folder)
            assert not is_held(folder / "none", unknown=True)
            assert not is_held(folder / "lock", unknown=True)
