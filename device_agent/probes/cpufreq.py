"""CPU frequency probe: clocks, their limits, governors, CPUs online, and the kernel's account of time at each clock."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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
"""What power mode and heat leave, which changes while the board runs; not what the hardware is made for."""

MEAN_HERTZ = "cpu.f_hertz"
S_PER_TICK = 0.01
TIME_IN_STATE_LINE = re.compile(r"([0-9]{1,9})\s+([0-9]{1,20})")


def read(root: Path, profile: Profile, at: float) -> ProbeResult:
    """Read `cpu.f_hertz`, each policy's clock and what it may be now, `cpu.online_count` and the governors.

    A source that was passed over for a worse one is an absence too, such as `cpu.firmware_hertz` of a Raspberry Pi
    whose mailbox is not ours to open.

    Args:
        root: The board's root folder.
        at: Monotonic seconds of the readings.
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
        missing |= answer.absent
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
    """Return the mean clock over the CPUs that are on, as good as its worst part; modelled where it lacks CPUs.

    Args:
        at: Monotonic seconds of the reading.
    """
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
    """Return each policy's clock.

    Args:
        clocks: As one source gives them; a clock without CPUs is that of every policy.
        at: Monotonic seconds of the readings.
    """
    readings: dict[str, Reading] = {}
    for clock in clocks:
        for name in [clock.name] if clock.cpus else names:
            if name in names:
                readings[f"cpu.{name}_hertz"] = _make_reading(clock.hertz, clock.source, clock.quality, at)
    return readings


def read_governors(folders: Sequence[Path]) -> dict[str, str]:
    """Read the fact `governor`: the one of all policies, or each of them once; nothing where none answers."""
    said: dict[str, None] = {}
    for folder in folders:
        try:
            said[read_text(folder / "scaling_governor")] = None
        except NoData:
            continue
    return {"governor": " ".join(said)} if any(said) else {}


def _make_reading(hertz: float, source: str, quality: Quality, at: float) -> Reading:
    share = UNCERTAINTY[quality]
    uncertainty = None if share is None else share * hertz
    return Reading(value=hertz, unit="hertz", source=source, quality=quality, at=at, uncertainty=uncertainty)


def parse_time_in_state(content: str) -> dict[float, float]:
    """Parse seconds by clock in hertz, out of lines such as `600000 31415` (kHz, hundredths of a second).

    Raises:
        NoData: It is empty, as of a driver that switches too fast to be counted, or says something else.
    """
    lines = [TIME_IN_STATE_LINE.fullmatch(line.strip()) for line in content.splitlines()]
    seconds = {float(line[1]) * HERTZ_PER_KHZ: float(line[2]) * S_PER_TICK for line in lines if line}
    if not seconds or len(seconds) < len(lines):
        raise NoData(f"{content[:40]!r} is no time in states", lack="invalid")
    return seconds


def read_time_in_state(policy: Path) -> dict[float, float]:
    """Read the seconds that a policy has been at each clock since boot; a mean clock out of them needs no sampling.

    Raises:
        NoData: The kernel does not count them.
    """
    return parse_time_in_state(read_text(policy / "stats" / "time_in_state"))


def subtract_times(before: Mapping[float, float], after: Mapping[float, float]) -> dict[float, float] | None:
    """Return the seconds at each clock between two accounts; None if nothing was counted, or the account began anew."""
    spent = {hertz: seconds - before.get(hertz, 0.0) for hertz, seconds in after.items()}
    if before.keys() - after.keys() or min(spent.values(), default=-1.0) < 0 or not any(spent.values()):
        return None
    return spent


def mean_hertz(spent: Mapping[float, float]) -> float:
    """Return the mean clock: what an always busy core would have run, over the time it took."""
    return sum(hertz * seconds for hertz, seconds in spent.items()) / sum(spent.values())
