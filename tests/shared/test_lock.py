"""One process at a time in a folder."""

import pytest

from shared.errors import ConfigError
from shared.lock import held


def test_a_folder_is_held_once_and_free_again_afterwards(tmp_path):
    """The second holder is told what to do; a lock is not left behind."""
    with held(tmp_path), pytest.raises(ConfigError, match="in use by another process"), held(tmp_path):
        pytest.fail("two hold it")
    with held(tmp_path):
        pass
