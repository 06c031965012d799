"""CPU frequency probe: clocks, limits, governors, online CPUs and time in state."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from device_agent.hardware.files import read_text
from device_agent.probes.base import ProbeResult, describe_absence
from device_agent.probes.clocks import (
    HERTZ_PER_KHZ,
    UNCERTAINTY,
    WORST_LAST,
    ClockAnswer,
    CpuClock,
    find_policies,
    read_clocks,
    read_first_clock,
    read_online_count,
)
from device_agent.profile.schema import Profile
from shared.errors import NoData
from shared.protocol.measurements import Absent, Quality, Reading

MAX_CLOCK_FILE = "scaling_max_freq"
"""Current limit, which power mode and throttling change at run time; cpuinfo_max_freq is that of the hardware."""

MEAN_HERTZ = "cpu.f_hertz"
S_PER_TICK = 0.01
TIME_IN_STATE_LINE = re.compile(r"([0-9]{1,9})\s+([0-9]{1,20})")


def read(root: Path, profile: Profile, at: float) -> ProbeResult:
    """Read `cpu.f_hertz`, each policy's clock and current limit, `cpu.online_count` and the governors.

    A better source that fails is an absence too, such as `cpu.firmware_hertz` of a Raspberry Pi whose mailbox this
    user may not open.
    """
    readings: dict[str, Reading] = {}
    missing: dict[str, Absent] = {}
    try:
        folders = find_policies(root)
    except NoData as error:
        folders = []
        missing["cpu.policies"] = describe_absence(error)
    try:
        answer = read_clocks(root, profile.cpu)
        readings |= make_readings(answer.clocks, [folder.name for folder in folders], at)
        missing |= {name: describe_absence(error) for name, error in answer.absent.items()}
        if answer.part:
            missing[MEAN_HERTZ] = answer.part
        else:
            readings[MEAN_HERTZ] = make_mean(answer, at)
    except NoData as error:
        missing[MEAN_HERTZ] = describe_absence(error)
    for folder in folders:
        name = f"cpu.{folder.name}_max_hertz"
        try:
            source, hertz = read_first_clock(folder, [MAX_CLOCK_FILE])
            readings[name] = Reading(value=hertz, unit="hertz", source=f"cpufreq {source}", quality="measured", at=at)
        except NoData as error:
            missing[name] = describe_absence(error)
    try:
        count, file = read_online_count(root)
        readings["cpu.online_count"] = Reading(value=count, unit="count", source=file, quality="measured", at=at)
    except NoData as error:
        missing["cpu.online_count"] = describe_absence(error)
    return ProbeResult(readings=readings, absent=missing, facts=read_governors(folders))


def make_mean(answer: ClockAnswer, at: float) -> Reading:
    """Return the mean clock of the online CPUs, with the worst quality among them; modelled if CPUs are missing."""
    clocks = answer.clocks
    mean = sum(clock.hertz * max(1, len(clock.cpus)) for clock in clocks) / sum(
        max(1, len(clock.cpus)) for clock in clocks
    )
    sources = "; ".join(dict.fromkeys(clock.source for clock in clocks))
    quality = max((clock.quality for clock in clocks), key=WORST_LAST.index)
    if answer.covered:
        return _make_reading(mean, f"{sources}; {answer.covered}", "modelled", at)
    return _make_reading(mean, sources, quality, at)


def make_readings(clocks: Sequence[CpuClock], names: Sequence[str], at: float) -> dict[str, Reading]:
    """Return a reading per policy.

    Args:
        clocks: Clocks of one source; a clock without CPUs applies to every policy.
    """
    readings: dict[str, Reading] = {}
    for clock in clocks:
        for name in [clock.name] if clock.cpus else names:
            if name in names:
                readings[f"cpu.{name}_hertz"] = _make_reading(clock.hertz, clock.source, clock.quality, at)
    return readings


def read_governors(folders: Sequence[Path]) -> dict[str, str]:
    """Read the fact `governor`: the distinct governors of all policies; empty if none can be read."""
    governors: dict[str, None] = {}
    for folder in folders:
        try:
            governors[read_text(folder / "scaling_governor")] = None
        except NoData:
            continue
    return {"governor": " ".join(governors)} if any(governors) else {}


def _make_reading(hertz: float, source: str, quality: Quality, at: float) -> Reading:
    share = UNCERTAINTY[quality]
    uncertainty = None if share is None else share * hertz
    return Reading(value=hertz, unit="hertz", source=source, quality=quality, at=at, uncertainty=uncertainty)


def parse_time_in_state(content: str) -> dict[float, float]:
    """Parse seconds by clock in hertz from lines such as `600000 31415` (kHz, hundredths of a second).

    Raises:
        NoData: The content is empty, as with drivers that switch too fast to count, or malformed.
    """
    lines = [TIME_IN_STATE_LINE.fullmatch(line.strip()) for line in content.splitlines()]
    seconds = {float(line[1]) * HERTZ_PER_KHZ: float(line[2]) * S_PER_TICK for line in lines if line}
    if not seconds or len(seconds) < len(lines):
        raise NoData(f"{content[:40]!r} is not a time_in_state table", lack="invalid")
    return seconds


def read_time_in_state(policy: Path) -> dict[float, float]:
    """Read a policy's seconds at each clock since boot; raises NoData if the kernel does not count them.

    A mean clock can be computed from two of these without sampling in between.
    """
    return parse_time_in_state(read_text(policy / "stats" / "time_in_state"))
