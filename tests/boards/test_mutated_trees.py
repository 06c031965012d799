"""Thousands of spoilt boards: no crash, no hang, no figure that is false."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from device_agent.commands.diagnosis import record_board
from device_agent.measurement.board import run_probes
from device_agent.probes import PROBES, thermal
from device_agent.profile.load import load_for_board
from device_agent.profile.schema import Profile
from tests.boards import mutate, units
from tests.boards.conftest import HANG_S
from tests.boards.test_fixtures import BOARDS, FOLDERS
from tests.machine import RECORDED as ROOT
from tests.machine import grow

TREES, SEED = int(os.environ.get("TREES", "240")), int(os.environ.get("SEED", "0"))
"""Every seed is a row of trees of its own."""
RECORDED = (
    "jetson-orin-nano/tree",
    "jetson-agx-orin/tegrastats-2",
    "jetson-nano/iio",
    "rpi-5/8acvqG",
    "x86-generic/tree",
)


@pytest.fixture(scope="module")
def boards(tmp_path_factory) -> list[tuple[Path, Profile, Any]]:
    """Fixtures of our own and, where they are there, boards that others recorded."""
    folder = tmp_path_factory.mktemp("boards")
    roots = [shutil.copytree(BOARDS / name / "root", folder / name) for name in FOLDERS]
    if (recorded := ROOT / "reference" / "boards").is_dir():
        chosen = [unit for unit in RECORDED if unit in units.PARTS]
        roots += [units.build(recorded, unit, folder / unit.replace("/", "-")) for unit in chosen]
    found = []
    for root in roots:
        profile = load_for_board(root)
        found.append((root, profile, run_probes(root, profile, PROBES, lambda: 1.0)))
    return found


def test_a_spoilt_board_keeps_what_it_has_and_invents_nothing(boards, caplog) -> None:
    """Seeded; files and folders gone, refused, endless, of another kind, or full of what no driver writes."""
    caplog.set_level(logging.DEBUG, "device_agent.probes.base")
    wrong: dict[int, object] = {}
    for seed in range(SEED * 1_000_003, SEED * 1_000_003 + TREES):
        root, profile, whole = boards[seed % len(boards)]
        signal.alarm(HANG_S)
        with mutate.spoilt(root, seed) as harmless:
            found = run_probes(root, profile, PROBES, lambda: 1.0)
            load_for_board(root)
        if false := mutate.find_false(whole, found, harmless=harmless):
            wrong[seed] = false
        if caplog.records:
            wrong[seed] = [str(record.exc_info) for record in caplog.records]
            caplog.clear()
    assert not wrong, f"{len(wrong)} of {TREES}: {mutate.count(wrong)}"


@pytest.mark.parametrize("seed", range(3))
def test_a_spoilt_board_can_be_recorded(boards, seed, tmp_path) -> None:
    """What is copied of it gives no figure that it does not have."""
    root, profile, _ = boards[seed]
    signal.alarm(HANG_S)
    with mutate.spoilt(root, seed):
        here = run_probes(root, profile, PROBES, lambda: 1.0)
        record_board.record(root, tmp_path / "copy")
    there = run_probes(tmp_path / "copy" / record_board.ROOT, profile, PROBES, lambda: 1.0)
    assert {name: one.value for name, one in there.readings.items()}.items() <= {
        name: one.value for name, one in here.readings.items()
    }.items()


def count_steps(work: Callable[[], object]) -> int:
    """Count the lines of Python that a piece of work runs."""
    steps = 0

    def trace(*_: object) -> Callable[..., Any]:
        nonlocal steps
        steps += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return steps


def test_four_times_the_zones_take_four_times_the_work(tmp_path) -> None:
    """All of one type, so that each needs a number of its own."""
    steps = []
    for count in (250, 1000):
        files = {f"sys/class/thermal/thermal_zone{one}/type": "acpitz" for one in range(count)}
        files |= {f"sys/class/thermal/thermal_zone{one}/temp": 30_000 + one for one in range(count)}
        root = grow(tmp_path / str(count), files)
        profile = load_for_board(root)
        steps.append(count_steps(lambda root=root, profile=profile: thermal.read(root, profile, 0.0)))
    assert steps[1] < 4.4 * steps[0]
