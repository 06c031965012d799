"""CPU seconds of all processes together, since the board started: how busy it is lies in the difference."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from device_agent.hardware.files import text
from device_agent.probes.base import Found
from device_agent.profile.schema import Profile
from shared.errors import NoData
from shared.protocol.measurements import Reading

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
SOURCE = "proc/stat"
ALL = "cpu"
CPU, TICKS = re.compile(r"cpu[0-9]{0,6}"), re.compile(r"[0-9]{1,20}")
FIELDS = 8  # user nice system idle iowait irq softirq steal; the guests after them are in user and nice already
IDLE = (3, 4)
STEAL = 7


class Seconds(msgspec.Struct, frozen=True):
    """What a CPU has done since the board started; time that a hypervisor gave to others counts as neither."""

    busy: float
    total: float


def parse(stat: str, ticks_per_s: float = TICKS_PER_S) -> dict[str, Seconds]:
    """Return the seconds by `cpu` (all of them) and `cpu0`, … as /proc/stat lists them; offline ones are not there."""
    cpus = {}
    for line in stat.splitlines():
        name, *words = line.split()[: FIELDS + 1] or [""]
        if not CPU.fullmatch(name) or len(words) <= max(IDLE) or not all(map(TICKS.fullmatch, words)):
            continue
        ticks = [int(word) for word in words]
        idle = sum(ticks[field] for field in IDLE)
        total = sum(ticks[:STEAL])
        cpus[name] = Seconds(busy=(total - idle) / ticks_per_s, total=total / ticks_per_s)
    return cpus


def busy_between(before: Mapping[str, Seconds], after: Mapping[str, Seconds]) -> dict[int, float]:
    """Return busy seconds by number of CPU; one that was away, or whose counter went back, has none."""
    return {
        int(name.removeprefix(ALL)): max(0.0, after[name].busy - before[name].busy)
        for name in after.keys() & before.keys()
        if name != ALL
    }


def read(root: Path, profile: Profile, at: float) -> Found:
    """Return `cputime.busy_seconds` and `cputime.total_seconds`, of all CPUs together."""
    path = root / SOURCE
    seconds = parse(text(path)).get(ALL)
    if seconds is None:
        raise NoData(f"{path}: no line of all CPUs", lack="invalid")
    values = {"cputime.busy_seconds": seconds.busy, "cputime.total_seconds": seconds.total}
    readings = {
        name: Reading(value=value, unit="seconds", source=SOURCE, quality="measured", at=at)
        for name, value in values.items()
    }
    return Found(readings=readings)
