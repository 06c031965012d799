"""Power-mode probe of a Jetson, and whether the clocks are pinned."""

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
    """Read the facts `mode` (of a Jetson) and `clocks`: `pinned` where the least clock allowed is the highest.

    Args:
        root: The board's root folder.
        at: Monotonic seconds of the readings.

    Raises:
        NoData: The board has neither power modes nor clocks to be set.
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
    """Return the name of the power mode now, from nvpmodel's own files, else from `nvpmodel -q`.

    Files first: in a container the tool takes the board for another one.

    Raises:
        NoData: Neither names it.
    """
    try:
        number = parse_mode_number(read_text(root / table.status))
        names = parse_mode_names(read_text(root / table.conf))
    except NoData:
        return parse_query(run_tool(root, "nvpmodel", "-q"))
    return names.get(number, f"mode {number}")


def parse_mode_number(status: str) -> int:
    """Parse the number in `pmode:0002 fmode:fan_mode_quiet`; raises NoData."""
    found = re.search(r"\bpmode:(\d{1,6})(?!\d)", status, re.ASCII)
    if found is None:
        raise NoData(f"{status[:40]!r} names no power mode", lack="invalid")
    return int(found[1])


def parse_mode_names(conf: str) -> dict[int, str]:
    """Parse the names of the modes by number, out of lines such as `< POWER_MODEL ID=2 NAME=MAXN_SUPER >`."""
    lines = re.findall(
        r"^[ \t]*<[ \t]*POWER_MODEL[ \t]+ID=(\d{1,6})[ \t]+NAME=(\S{1,80})[ \t]*>", conf, re.ASCII | re.MULTILINE
    )
    return {int(number): name for number, name in lines}


def parse_query(answer: str) -> str:
    """Parse the name in what `nvpmodel -q` prints, warnings and fan modes around it; raises NoData."""
    found = re.search(r"^NV Power Mode:[ \t]*(\S+)[ \t]*$", answer, re.MULTILINE)
    if found is None:
        raise NoData(f"nvpmodel -q: {answer.strip()[:80]!r} names no power mode", lack="invalid")
    return found[1]


def _read_pinning(root: Path) -> dict[str, str]:
    try:
        limits = [[read_number(folder / name) for name in LIMIT_FILES] for folder in find_policies(root)]
    except NoData:
        return {}
    if not limits or min(map(min, limits)) <= 0:
        return {}
    return {"clocks": "pinned" if all(least == most for least, most in limits) else "free"}
