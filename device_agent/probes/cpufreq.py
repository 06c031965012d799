"""How fast the CPUs run now, how fast they may, how many of them are on, and who decides.

How long a policy ran at each clock: the kernel's own account, out of which a mean clock needs no sampling.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from device_agent.hardware.files import text
from device_agent.probes.base import Found, absent
from device_agent.probes.clocks import CPUS, UNCERTAINTY, WORST_LAST, CpuClock, clocks, kilohertz, online, policies
from device_agent.profile.schema import Profile
from shared.errors import NoData
from shared.protocol.measurements import Absent, Quality, Reading

MAX_FILES = ("scaling_max_freq", "cpuinfo_max_freq")
"""What power mode and heat leave, which changes while the board runs; what the hardware is made for."""


def read(root: Path, profile: Profile, at: float) -> Found:
    """Return `cpu.f_hertz`, each policy's clock and what it may be now, `cpu.online_count` and the governors.

    A source that was passed over for a worse one is an absence too, such as `cpu.firmware_hertz` of a Raspberry Pi
    whose mailbox is not ours to open.
    """
    readings: dict[str, Reading] = {}
    missing: dict[str, Absent] = {}
    folders = policies(root)
    try:
        answer = clocks(root, profile.cpu)
        readings |= of_clocks(answer.found, [folder.name for folder in folders], at)
        missing |= answer.absent
    except NoData as error:
        missing["cpu.f_hertz"] = absent(error)
    for folder in folders:
        name = f"cpu.{folder.name}_max_hertz"
        try:
            source, hertz = kilohertz(folder, MAX_FILES)
            readings[name] = Reading(value=hertz, unit="hertz", source=f"cpufreq {source}", quality="measured", at=at)
        except NoData as error:
            missing[name] = absent(error)
    try:
        count = online(root)
        readings["cpu.online_count"] = Reading(value=count, unit="count", source=CPUS, quality="measured", at=at)
    except NoData as error:
        missing["cpu.online_count"] = absent(error)
    return Found(readings=readings, absent=missing, facts=governors(folders))


def of_clocks(found: Sequence[CpuClock], names: Sequence[str], at: float) -> dict[str, Reading]:
    """Return the mean clock over the CPUs that are on, as good as its worst part, and each policy's own.

    A source that knows one clock for all CPUs knows it of every policy of those names.
    """
    mean = sum(clock.hertz * max(1, len(clock.cpus)) for clock in found) / sum(
        max(1, len(clock.cpus)) for clock in found
    )
    sources = "; ".join(dict.fromkeys(clock.source for clock in found))
    quality = max((clock.quality for clock in found), key=WORST_LAST.index)
    readings = {"cpu.f_hertz": _reading(mean, sources, quality, at)}
    for clock in found:
        for name in [clock.name] if clock.cpus else names:
            if name in names:
                readings[f"cpu.{name}_hertz"] = _reading(clock.hertz, clock.source, clock.quality, at)
    return readings


def governors(folders: Sequence[Path]) -> dict[str, str]:
    """Return the fact `governor`: the one of all policies, or each of them once; nothing where none says it."""
    said: dict[str, None] = {}
    for folder in folders:
        try:
            said[text(folder / "scaling_governor")] = None
        except NoData:
            continue
    return {"governor": " ".join(said)} if any(said) else {}


def _reading(hertz: float, source: str, quality: Quality, at: float) -> Reading:
    share = UNCERTAINTY[quality]
    uncertainty = None if share is None else share * hertz
    return Reading(value=hertz, unit="hertz", source=source, quality=quality, at=at, uncertainty=uncertainty)


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


def read_time_in_state(policy: Path) -> dict[float, float]:
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
