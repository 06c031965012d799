"""Reported clock against a counting loop, at every clock step of recorded boards."""

from __future__ import annotations

import re
from pathlib import Path

from device_agent.probes import cpufreq
from device_agent.profile.load import load_for_board
from device_agent.profile.schema import Profile
from tests.boards import material, units

STEADY = 0.02
"""Spread of three counts beyond which the loop was disturbed, and says nothing of the clock."""

BOUNDS = {
    "jetson-agx-orin/4ax9": 0.02,
    "jetson-agx-xavier/4ebH": 0.05,
    "jetson-nano/4rLX": 0.05,
    "jetson-orin-nano/4Ebd": 0.01,
    "jetson-orin-nano/4vy7": 0.02,
    "jetson-orin-nano/87lq": 0.01,
    "jetson-xavier-nx/3YWp": 0.05,
    "rpi-3bplus/1iH0": 0.03,
    "rpi-4b/3EgS": 0.01,
    "rpi-4b/4pzj": 0.01,
    "rpi-5/8-NK": 0.01,
    "rpi-5/8acvqG": 0.01,
}
"""Most that the reported clock may be off, as a share. The Carmel cores' lowest step is corrected by their profiles."""


def steps(table: str) -> list[tuple[float, float | None, float]]:
    """Return what the driver said, the firmware if there is one, and the loop counted, in MHz."""
    rows = []
    for line in table.splitlines():
        found = re.match(r"Cpufreq OPP: +(\d+) +(?:ThreadX: +(\d+) +)?Measured: +(.*)", line)
        if found:
            counts = [float(one) for one in re.findall(r"\d+\.\d+(?=[/)]|$)|^\d+", re.sub(r"@.*", "", found[3]))]
            if max(counts) - min(counts) <= STEADY * max(counts):
                rows.append((float(found[1]), float(found[2]) if found[2] else None, sum(counts) / len(counts)))
    return rows


def clock_mhz(root: Path, profile: Profile, said: float, firmware: float | None) -> float:
    material.write(material.clocks({0: said}) | {"sys/devices/system/cpu/cpufreq/policy0/affected_cpus": "0\n"}, root)
    if firmware is not None:
        material.write({"tools/vcgencmd measure_clock arm": f"frequency(48)={firmware * 1e6:.0f}\n"}, root)
    return cpufreq.read(root, profile, 1.0).readings["cpu.f_hertz"].value / 1e6


def worst_step(boards: Path, unit: str, root: Path) -> tuple[int, float, float]:
    """Return how many steps a unit has, the one whose clock is furthest off, in MHz, and by which share."""
    board, _, name = unit.partition("/")
    material.write(units.PARTS[unit][0](boards / board), root)
    rows = steps((boards / board / f"sbcbench_opp_vs_measured_{name}.txt").read_text())
    profile = load_for_board(root, "auto")
    off = {said: clock_mhz(root, profile, said, firmware) / counted - 1 for said, firmware, counted in rows}
    worst = max(off, key=lambda said: abs(off[said]))
    return len(rows), worst, off[worst]
