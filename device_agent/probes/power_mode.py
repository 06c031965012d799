"""The power mode of a Jetson, and whether somebody pinned the clocks."""

from __future__ import annotations

import re
from pathlib import Path

from device_agent.hardware.files import text
from device_agent.hardware.tools import output
from device_agent.probes.base import Found, absent
from device_agent.probes.clocks import policies
from device_agent.profile.schema import PowerMode, Profile
from shared.errors import NoData
from shared.protocol.measurements import Absent


def read(root: Path, profile: Profile, at: float) -> Found:
    """Return the facts `mode` (of a Jetson) and `clocks`: `pinned` where the least clock allowed is the highest.

    Raises:
        NoData: The board has neither power modes nor clocks to be set.
    """
    facts = _clocks(root)
    lacking: dict[str, Absent] = {}
    if profile.power_mode.kind == "nvpmodel":
        try:
            facts["mode"] = mode(root, profile.power_mode)
        except NoData as error:
            lacking["mode"] = absent(error)
    if not facts and not lacking:
        raise NoData(f"{root}: no power modes, and no clocks that can be set")
    return Found(facts=facts, absent=lacking)


def mode(root: Path, told: PowerMode) -> str:
    """Return the name of the power mode now, from nvpmodel's own files, else from `nvpmodel -q`.

    Files first: in a container the tool takes the board for another one.

    Raises:
        NoData: Neither knows.
    """
    try:
        number = mode_number(text(root / told.status))
        names = mode_names(text(root / told.conf))
    except NoData:
        return queried(output(root, "nvpmodel", "-q"))
    return names.get(number, f"mode {number}")


def mode_number(status: str) -> int:
    """Return the number out of `pmode:0002 fmode:fan_mode_quiet`; raises NoData."""
    found = re.search(r"\bpmode:(\d+)", status, re.ASCII)
    if found is None:
        raise NoData(f"{status[:40]!r} names no power mode", lack="invalid")
    return int(found[1])


def mode_names(conf: str) -> dict[int, str]:
    """Return the names of the modes by number, out of lines such as `< POWER_MODEL ID=2 NAME=MAXN_SUPER >`."""
    lines = re.findall(r"^\s*<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=(\S+)\s*>", conf, re.ASCII | re.MULTILINE)
    return {int(number): name for number, name in lines}


def queried(answer: str) -> str:
    """Return the name out of what `nvpmodel -q` prints, warnings and fan modes around it; raises NoData."""
    found = re.search(r"^NV Power Mode:[ \t]*(\S+)[ \t]*$", answer, re.MULTILINE)
    if found is None:
        raise NoData(f"nvpmodel -q: {answer.strip()[:80]!r} names no power mode", lack="invalid")
    return found[1]


def _clocks(root: Path) -> dict[str, str]:
    limits = [(_word(folder / "scaling_min_freq"), _word(folder / "scaling_max_freq")) for folder in policies(root)]
    if not limits or not all(all(pair) for pair in limits):
        return {}
    return {"clocks": "pinned" if all(least == most for least, most in limits) else "free"}


def _word(path: Path) -> str:
    try:
        return text(path)
    except NoData:
        return ""
