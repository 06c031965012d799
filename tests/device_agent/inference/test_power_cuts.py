"""`kill -9` of the agent at 100 random points of its swaps: a version that works is always there, and it goes on."""

from __future__ import annotations

import json
import subprocess  # noqa: TID251 - agents that are killed
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

ROOT, MEMORY = Path(__file__).parents[3], Path("/dev/shm")  # noqa: S108 - a disk that syncs at once
KILLS, SEED = 100, 20


@pytest.fixture
def board(tmp_path) -> Iterator[Path]:
    """Return a folder, of memory where there is such a disk: what counts here is the order of calls."""
    with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else tmp_path) as name:
        yield Path(name)


def test_a_working_version_outlives_every_power_cut(board):
    """See `power_cuts`: good versions, poor ones that a gate refuses, and bad ones that go back from their trial."""
    command = [sys.executable, "-m", "tests.device_agent.inference.power_cuts", str(board), str(SEED), str(KILLS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603 - ours
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    assert sum(told["phases"].values()) == KILLS
    assert told["offered"] >= told["committed"] > KILLS // 10  # it went on all the time
    assert {"offered", "fetched", "verified", "staged", "trial", "committed"} <= told["phases"].keys()
