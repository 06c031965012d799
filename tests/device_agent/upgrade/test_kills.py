"""A hundred upgrades with `kill -9` of updater or agent at random moments."""

from __future__ import annotations

import json
import subprocess  # noqa: TID251 - it forks
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[3]
KILLS, SEED, HANG_S = 100, 22, 900


def test_whatever_is_cut_off_a_whole_version_runs_and_the_upgrade_comes_to_its_end(tmp_path):
    """Each case asserts that; see `kills`."""
    command = [sys.executable, "-m", "tests.device_agent.upgrade.kills", str(tmp_path), str(KILLS), str(SEED)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=HANG_S)  # noqa: S603
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"case {len(cases)} of seed {SEED}: {done.stderr[-3000:]}"
    reached = [one for one in cases if one["reached"]]
    assert len(reached) == KILLS
    assert {one["cut"] for one in reached} == {"updater", "power", "agent"}
    assert len(Counter(one["moment"] for one in reached)) > KILLS // 8
    assert {one["state"] for one in reached} == {"committed", "rolled-back"}
