"""What the probes make of every board that was recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.boards import units
from tests.boards.__main__ import EXPECTED
from tests.boards.compare import compare, load
from tests.machine import shared

TABLE = load(EXPECTED)


@pytest.mark.parametrize("unit", TABLE)
def test_a_recorded_board_gives_what_was_worked_out_by_hand(unit, tmp_path) -> None:
    """Profile, rails, total, clocks, temperatures, throttle bits and modes; no power figure beyond these."""
    lines = compare(units.build(shared("reference", "boards"), unit, tmp_path), TABLE[unit])
    assert lines
    assert [line for line in lines if not line.same] == []


def test_every_recorded_folder_is_covered() -> None:
    """A folder that is added to the recordings fails here until somebody says what it must give."""
    folders = {path.name for path in shared("reference", "boards").iterdir() if path.is_dir()}
    assert folders == {unit.partition("/")[0] for unit in TABLE} | units.NO_BOARDS.keys()
    assert TABLE.keys() == units.PARTS.keys()


def test_every_figure_of_power_is_expected_by_name(tmp_path) -> None:
    """A rail that nobody expects is a difference, so that none can be counted twice unseen."""
    root = units.build(shared("reference", "boards"), "jetson-orin-nano/4vy7", tmp_path)
    chip = next(Path(root).glob("sys/class/hwmon/hwmon*/in3_label")).parent
    (chip / "in2_label").write_text("VDD_NOBODY_KNOWS\n")
    wrong = {line.what for line in compare(root, TABLE["jetson-orin-nano/4vy7"]) if not line.same}
    assert wrong == {"power.VDD_CPU_GPU_CV_watts", "power.VDD_NOBODY_KNOWS_watts"}
