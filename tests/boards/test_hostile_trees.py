"""Boards with unreadable, false or missing files: other figures stay, causes are named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from device_agent.measurement.board import run_probes
from device_agent.probes import PROBES
from device_agent.probes.base import ProbeResult
from device_agent.profile.load import load_for_board
from tests.boards.test_fixtures import BOARDS, FOLDERS
from tests.machine import as_nobody, busy

OPEN = 0o055
GARBAGE = ("", "not a number\n", "-1\n", "99999999999999999999999\n", "\0\0\0", "NaN\n", "é\n")


@pytest.fixture
def orin(tmp_path) -> Path:
    return shutil.copytree(BOARDS / "jetson-orin-nx" / "root", tmp_path / "root")


def found(root: Path) -> ProbeResult:
    return run_probes(root, load_for_board(root, "auto"), PROBES, lambda: 1.0)


def test_a_zone_that_answers_eagain_is_busy_and_the_others_stay(orin) -> None:
    with busy(orin / "sys/class/thermal/thermal_zone2/temp"):
        board = found(orin)
    assert board.absent["thermal.tj-thermal_celsius"].lack == "busy"
    assert board.readings["thermal.hottest_celsius"].value == 51.25


def test_a_rail_that_answers_eagain_takes_the_total_along(orin) -> None:
    """A total without its rail would be a figure nobody measured."""
    with busy(orin / "sys/class/hwmon/hwmon2/curr1_input"):
        board = found(orin)
    assert board.absent["power.VDD_IN_watts"].lack == "busy"
    assert "power.total_watts" not in board.readings
    assert board.readings["power.VDD_SOC_watts"].value == pytest.approx(1.9968)


def test_files_of_mode_0400_are_denied(orin) -> None:
    """The board's tree is another user's; the agent's user reads what is open to all."""
    closed = [orin / "sys/class/thermal/thermal_zone0/temp", orin / "sys/class/hwmon/hwmon2/in3_input"]
    for folder in (orin, *orin.parents):
        if folder.stat().st_mode & OPEN != OPEN:  # pytest's own folders are for their owner alone
            folder.chmod(folder.stat().st_mode | OPEN)
    for path in closed:
        path.chmod(0o400)
    with as_nobody():
        board = found(orin)
    assert board.absent["thermal.cpu-thermal_celsius"].lack == "denied"
    assert board.absent["power.VDD_SOC_watts"].lack == "denied"
    assert board.readings["power.total_watts"].value == pytest.approx(9.0)


def test_the_clock_is_the_mean_over_cpus_that_are_on(orin) -> None:
    """CPUs 4 and 5 go off as well, their policy with them."""
    shutil.rmtree(orin / "sys/devices/system/cpu/cpufreq/policy4")
    (orin / "sys/devices/system/cpu/online").write_text("0-3\n")
    board = found(orin)
    assert board.readings["cpu.f_hertz"].value == 1190400000
    assert board.readings["cpu.online_count"].value == 4


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("garbage", GARBAGE)
def test_no_file_can_break_a_probe(name, garbage, tmp_path) -> None:
    """One file after another holds rubbish: only lacks come of it, figures stay finite, and no probe raises."""
    root = shutil.copytree(BOARDS / name / "root", tmp_path / "root")
    profile = load_for_board(root, "auto")
    for path in [path for path in sorted(root.rglob("*")) if path.is_file()]:
        content = path.read_bytes()
        path.write_text(garbage)
        board = run_probes(root, profile, PROBES, lambda: 1.0)
        assert all(abs(reading.value) < 1e25 for reading in board.readings.values()), path
        path.write_bytes(content)


def test_a_board_without_any_file_has_only_absences(tmp_path) -> None:
    board = found(tmp_path)
    assert board.readings == {}
    assert {"cpu.f_hertz", "thermal"} <= board.absent.keys()
    assert {lack.lack for lack in board.absent.values()} == {"not_present"}
