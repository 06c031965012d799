"""CPU-time probe: busy and total CPU seconds since boot from /proc/stat."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

from device_agent.hardware.files import read_text
from device_agent.probes.base import ProbeResult
from device_agent.profile.schema import Profile
from shared.errors import NoData
from shared.protocol.measurements import Reading

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
SOURCE = "proc/stat"
ALL_CPUS = "cpu"
CPU_NAME, TICK_COUNT = re.compile(r"cpu[0-9]{0,6}"), re.compile(r"[0-9]{1,20}")
STAT_FIELDS = 8  # user nice system idle iowait irq softirq steal; the guests after them are in user and nice already
IDLE_FIELDS = (3, 4)
STEAL_FIELD = 7


class CpuSeconds(msgspec.Struct, frozen=True):
    """Busy and total seconds of a CPU since boot, both without time stolen by a hypervisor."""

    busy: float
    total: float


def parse_stat(stat: str, ticks_per_s: float = TICKS_PER_S) -> dict[str, CpuSeconds]:
    """Parse /proc/stat into seconds by `cpu` (all CPUs together), `cpu0`, …; offline CPUs are missing."""
    cpus = {}
    for line in stat.splitlines():
        name, *counts = line.split()[: STAT_FIELDS + 1] or [""]
        if (
            not CPU_NAME.fullmatch(name)
            or len(counts) <= max(IDLE_FIELDS)
            or not all(map(TICK_COUNT.fullmatch, counts))
        ):
            continue
        ticks = [int(count) for count in counts]
        idle = sum(ticks[field] for field in IDLE_FIELDS)
        total = sum(ticks[:STEAL_FIELD])
        cpus[name] = CpuSeconds(busy=(total - idle) / ticks_per_s, total=total / ticks_per_s)
    return cpus


def read(root: Path, profile: Profile, at: float) -> ProbeResult:
    """Read `cputime.busy_seconds` and `cputime.total_seconds` of all CPUs together; utilisation is d busy / d total."""
    path = root / SOURCE
    seconds = parse_stat(read_text(path)).get(ALL_CPUS)
    if seconds is None:
        raise NoData(f"{path}: no line `cpu`", lack="invalid")
    values = {"cputime.busy_seconds": seconds.busy, "cputime.total_seconds": seconds.total}
    readings = {
        name: Reading(value=value, unit="seconds", source=SOURCE, quality="measured", at=at)
        for name, value in values.items()
    }
    return ProbeResult(readings=readings)
