"""Power-mode probe: nvpmodel's mode on a Jetson, and pinned clocks."""

from __future__ import annotations

import re
from pathlib import Path

from device_agent.hardware.files import read_text
from device_agent.hardware.tools import run_tool
from device_agent.probes.base import ProbeResult, describe_absence, read_number
from device_agent.probes.clocks import find_policies
from device_agent.profile.schema import PowerMode, Profile
from shared.errors import NoData
from shared.protocol.measurements import Absent

LIMIT_FILES = ("scaling_min_freq", "scaling_max_freq")


def read(root: Path, profile: Profile, at: float) -> ProbeResult:
    """Read the facts `mode` (Jetson) and `clocks`: `pinned` if minimum and maximum clock are equal, else `free`.

    Raises:
        NoData: The board has neither power modes nor cpufreq.
    """
    facts = _read_pinning(root)
    lacking: dict[str, Absent] = {}
    if profile.power_mode.kind == "nvpmodel":
        try:
            facts["mode"] = read_mode(root, profile.power_mode)
        except NoData as error:
            lacking["mode"] = describe_absence(error)
    if not facts and not lacking:
        raise NoData(f"{root}: no power modes, and no clocks that can be set")
    return ProbeResult(facts=facts, absent=lacking)


def read_mode(root: Path, table: PowerMode) -> str:
    """Return the name of the current power mode, from nvpmodel's files, else from `nvpmodel -q`; raises NoData.

    Files come first because in a container the tool mistakes the board for another.
    """
    try:
        number = parse_mode_number(read_text(root / table.status))
        names = parse_mode_names(read_text(root / table.conf))
    except NoData:
        return parse_query(run_tool(root, ["nvpmodel", "-q"]))
    return names.get(number, f"mode {number}")


def parse_mode_number(status: str) -> int:
    """Parse the number in `pmode:0002 fmode:fan_mode_quiet`; raises NoData."""
    match = re.search(r"\bpmode:(\d{1,6})(?!\d)", status, re.ASCII)
    if match is None:
        raise NoData(f"{status[:40]!r} names no power mode", lack="invalid")
    return int(match[1])


def parse_mode_names(conf: str) -> dict[int, str]:
    """Parse mode names by number from lines such as `< POWER_MODEL ID=2 NAME=MAXN_SUPER >`."""
    lines = re.findall(
        r"^[ \t]*<[ \t]*POWER_MODEL[ \t]+ID=(\d{1,6})[ \t]+NAME=(\S{1,80})[ \t]*>", conf, re.ASCII | re.MULTILINE
    )
    return {int(number): name for number, name in lines}


def parse_query(answer: str) -> str:
    """Parse the mode's name from the output of `nvpmodel -q`, which may hold warnings too; raises NoData."""
    match = re.search(r"^NV Power Mode:[ \t]*(\S+)[ \t]*$", answer, re.MULTILINE)
    if match is None:
        raise NoData(f"nvpmodel -q: {answer.strip()[:80]!r} names no power mode", lack="invalid")
    return match[1]


def _read_pinning(root: Path) -> dict[str, str]:
    try:
        limits = [[read_number(folder / name) for name in LIMIT_FILES] for folder in find_policies(root)]
    except NoData:
        return {}
    if not limits or min(map(min, limits)) <= 0:
        return {}
    return {"clocks": "pinned" if all(least == most for least, most in limits) else "free"}
