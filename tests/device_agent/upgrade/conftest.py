"""A board in a folder, whose agent is gone after the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.device_agent.upgrade.packages import UpgradeBoard


@pytest.fixture
def board(tmp_path: Path) -> Iterator[UpgradeBoard]:
    """Return a board on which version 1 runs."""
    made = UpgradeBoard(tmp_path / "board")
    made.service.start()
    yield made
    made.service.stop()
