"""One process at a time in a folder."""

import pytest

from shared.errors import ConfigError
from shared.runtime.processes import hold_lock
from tests.machine import as_nobody, open_to_all


def test_a_folder_is_held_once_and_free_again_afterwards(tmp_path):
    """The second holder is told what to do; a lock is not left behind."""
    with hold_lock(tmp_path), pytest.raises(ConfigError, match="in use by another process"), hold_lock(tmp_path):
        pytest.fail("two hold it")
    with hold_lock(tmp_path):
        pass


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
