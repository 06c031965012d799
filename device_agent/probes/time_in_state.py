"""How long a policy ran at each clock: the kernel's own account, out of which a mean clock needs no sampling."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from device_agent.probes.base import text
from shared.errors import NoData

HERTZ_PER_KHZ = 1e3
S_PER_TICK = 0.01
LINE = re.compile(r"([0-9]{1,9})\s+([0-9]{1,20})")


def parse(content: str) -> dict[float, float]:
    """Return seconds by clock in hertz, out of lines such as `600000 31415` (kHz, hundredths of a second).

    Raises:
        NoData: It is empty, as of a driver that switches too fast to be counted, or says something else.
    """
    lines = [LINE.fullmatch(line.strip()) for line in content.splitlines()]
    seconds = {float(line[1]) * HERTZ_PER_KHZ: float(line[2]) * S_PER_TICK for line in lines if line}
    if not seconds or len(seconds) < len(lines):
        raise NoData(f"{content[:40]!r} is no time in states", lack="invalid")
    return seconds


def read(policy: Path) -> dict[float, float]:
    """Return the seconds a policy has been at each clock since the board started; raises NoData."""
    return parse(text(policy / "stats" / "time_in_state"))


def between(before: Mapping[float, float], after: Mapping[float, float]) -> dict[float, float] | None:
    """Return the seconds at each clock in between; None if nothing was counted, or the account began anew."""
    spent = {hertz: seconds - before.get(hertz, 0.0) for hertz, seconds in after.items()}
    if before.keys() - after.keys() or min(spent.values(), default=-1.0) < 0 or not any(spent.values()):
        return None
    return spent


def mean_hertz(spent: Mapping[float, float]) -> float:
    """Return the mean clock: what an always busy core would have run, over the time it took."""
    return sum(hertz * seconds for hertz, seconds in spent.items()) / sum(spent.values())
