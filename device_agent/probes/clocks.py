"""CPU clocks by source: a Raspberry Pi's firmware, cpufreq policies, /proc/cpuinfo, the board's profile.

Only policies are read, never cpu0, cpu1, …: a CPU that is off has no folder. On a Raspberry Pi the firmware slows its
one clock down behind Linux' back: there the files only announce, and their figures count as modelled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from device_agent.hardware import firmware
from device_agent.hardware.bounds import MAX_CPUS
from device_agent.hardware.files import list_folder, read_text
from device_agent.probes.base import describe_absence, read_number
from device_agent.profile.schema import Cpu
from shared.errors import NoData
from shared.protocol.measurements import Absent, Quality

CPU_FOLDER = "sys/devices/system/cpu"
POLICY_FOLDER = f"{CPU_FOLDER}/cpufreq"
CPUINFO = "proc/cpuinfo"
COUNTED_CLOCK = "cpuinfo_avg_freq"
CLOCK_FILES = (COUNTED_CLOCK, "cpuinfo_cur_freq", "scaling_cur_freq")
"""Counted by the cores; asked of the hardware, for root alone; what the driver set last or, on x86, counted too."""

PLAUSIBLE_HERTZ = (1e6, 2e10)
HERTZ_PER_KHZ, HERTZ_PER_MHZ = 1e3, 1e6
WORST_LAST: tuple[Quality, ...] = ("measured", "corrected", "modelled")
UNCERTAINTY: Mapping[Quality, float | None] = {"measured": 0.03, "corrected": 0.05, "modelled": None}
"""One standard deviation, as a share. Drivers and firmware were within 3 % of a counting loop on every recorded board,
but for the lowest clocks of Carmel cores, which a profile corrects."""


class CpuClock(msgspec.Struct, frozen=True, kw_only=True):
    """A clock and the CPUs that run by it; none named: all that are on."""

    name: str
    cpus: tuple[int, ...] = ()
    hertz: float
    source: str
    quality: Quality


class ClockAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Clocks by one source, and the figures that are missing, with their causes.

    Attributes:
        part: Why a clock that is there is not among these; None where all are. A mean of a part is none.
        covered: How many of the CPUs that are on have a clock at all, as words; empty where all have.
    """

    clocks: tuple[CpuClock, ...]
    absent: dict[str, Absent] = {}
    part: Absent | None = None
    covered: str = ""


def read_clocks(root: Path, cpu: Cpu) -> ClockAnswer:
    """Read the clocks by the first source that has those of all CPUs, in the end the profile's nominal clock.

    Raises:
        NoData: Nothing answers and the profile names no clock.
    """
    refusals: dict[str, NoData] = {}
    partial: ClockAnswer | None = None
    for source in cpu.sources:
        try:
            answer = CLOCK_SOURCES[source](root, cpu)
        except NoData as error:
            refusals[f"cpu.{source}_hertz"] = error
            continue
        if answer.part is None:
            return msgspec.structs.replace(answer, absent=_describe_absences(refusals) | answer.absent)
        partial = partial or answer
    if partial is not None:
        return msgspec.structs.replace(partial, absent=_describe_absences(refusals) | partial.absent)
    if not cpu.nominal_hertz:
        lacks = [error.lack for error in refusals.values() if error.lack != "not_present"]
        causes = "; ".join(str(error) for error in refusals.values())
        raise NoData(causes or "the profile names no clock", lack=lacks[0] if lacks else "not_present")
    nominal = CpuClock(name="nominal", hertz=cpu.nominal_hertz, source="profile", quality="modelled")
    return ClockAnswer(clocks=(nominal,), absent=_describe_absences(refusals))


def read_firmware(root: Path, cpu: Cpu) -> ClockAnswer:
    """Read the one clock of all CPUs of a Raspberry Pi, as its firmware counts it; raises NoData."""
    del cpu
    hertz = validate_hertz(firmware.parse_clock_hertz(firmware.ask(root, "measure_clock arm")), "the firmware")
    return ClockAnswer(clocks=(CpuClock(name="arm", hertz=hertz, source="firmware", quality="measured"),))


def read_policies(root: Path, cpu: Cpu) -> ClockAnswer:
    """Read the clock of every policy that answers; raises NoData where none does."""
    found: list[CpuClock] = []
    missing: dict[str, Absent] = {}
    part: Absent | None = None
    refusal = NoData(f"{root / POLICY_FOLDER}: no policy")
    for policy in find_policies(root):
        try:
            cpus = read_text(policy / "affected_cpus")
            if not cpus:
                refusal = NoData(f"{policy}: all its CPUs are off", lack="busy")
                missing[f"cpu.{policy.name}_hertz"] = describe_absence(refusal)
                continue
            found.append(_read_policy(policy, parse_cpu_list(cpus), cpu))
        except NoData as error:
            refusal = error
            part = missing[f"cpu.{policy.name}_hertz"] = describe_absence(error)
    if not found:
        raise refusal
    uncovered, words = _compare_online(root, found)
    return ClockAnswer(clocks=tuple(found), absent=missing, part=part or uncovered, covered=words)


def _compare_online(root: Path, clocks: Iterable[CpuClock]) -> tuple[Absent | None, str]:
    """Return why the CPUs of policies cannot be right, and how many of those that are on have a policy."""
    covered = [number for clock in clocks for number in clock.cpus]
    try:
        online = parse_cpu_list(read_text(root / CPU_FOLDER / "online"))
    except NoData as error:
        return (None if error.lack == "not_present" else describe_absence(error)), ""
    if len(covered) > len(set(covered)) or not set(covered) <= set(online):
        cause = f"{root / POLICY_FOLDER}: policies with CPUs that are off, or in two of them"
        return Absent(lack="invalid", cause=cause), ""
    return None, "" if len(covered) == len(online) else f"{len(covered)} of {len(online)} CPUs"


def read_cpuinfo(root: Path, cpu: Cpu) -> ClockAnswer:
    """Read each CPU's clock in /proc/cpuinfo, which has it on x86 alone; raises NoData elsewhere.

    The kernel counts it (APERF over MPERF); in a virtual machine it is what the host set at the start: modelled.
    """
    del cpu
    content = read_text(root / CPUINFO)
    quality: Quality = "modelled" if re.search(r"^flags\b.*\bhypervisor\b", content, re.MULTILINE) else "measured"
    found: list[CpuClock] = []
    name, count = "", 0
    pattern = r"^(processor|cpu MHz)[ \t]*:[ \t]*([0-9]{1,6}(?:\.[0-9]{1,6})?)$"
    for key, value in re.findall(pattern, content, re.MULTILINE):
        if key == "processor":
            name, count = value, count + 1
            continue
        hertz = validate_hertz(float(value) * HERTZ_PER_MHZ, CPUINFO)
        found.append(
            CpuClock(name=f"cpu{name}", cpus=parse_cpu_list(name), hertz=hertz, source=CPUINFO, quality=quality)
        )
    if not found:
        raise NoData(f"{root / CPUINFO}: tells no clock")
    lacking = Absent(lack="invalid", cause=f"{CPUINFO}: tells the clocks of {len(found)} of {count} processors")
    return ClockAnswer(clocks=tuple(found), part=None if len(found) == count else lacking)


CLOCK_SOURCES: Mapping[str, Callable[[Path, Cpu], ClockAnswer]] = {
    "firmware": read_firmware,
    "cpufreq": read_policies,
    "cpuinfo": read_cpuinfo,
}


def find_policies(root: Path) -> list[Path]:
    """List the folders of the policies, by number; raises NoData where they may not be listed."""
    return list_folder(root / POLICY_FOLDER, "policy[0-9]*")


def read_online_count(root: Path) -> tuple[int, str]:
    """Count the CPUs that are on; return how many, and the file that says so. Raises NoData."""
    online = f"{CPU_FOLDER}/online"
    try:
        return len(parse_cpu_list(read_text(root / online))), online
    except NoData as error:
        if error.lack != "not_present":
            raise
    count = len(re.findall(r"^processor[ \t]*:", read_text(root / CPUINFO), re.MULTILINE))
    if not 0 < count <= MAX_CPUS:
        raise NoData(f"{root / CPUINFO}: names {count} processors", lack="invalid")
    return count, CPUINFO


def parse_cpu_list(content: str) -> tuple[int, ...]:
    """Parse the numbers in `0-3,6` or `0 1 2`; raises NoData."""
    numbers: list[int] = []
    for part in re.split(r"[,\s]+", content.strip()):
        ends = re.fullmatch(r"([0-9]{1,4})(?:-([0-9]{1,4}))?", part)
        first, last = (int(ends[1]), int(ends[2] or ends[1])) if ends else (0, -1)
        if last < first or last >= MAX_CPUS or (numbers and first <= numbers[-1]):
            raise NoData(f"{content[:40]!r} is no list of CPUs", lack="invalid")
        numbers += range(first, last + 1)
    return tuple(numbers)


def correct_hertz(hertz: float, cpu: Cpu) -> tuple[float, Quality]:
    """Correct a driver's clock where the profile knows that low ones read high; return it with its quality."""
    if cpu.low_opp_correction != 1 and hertz < cpu.low_opp_hertz:
        return hertz * cpu.low_opp_correction, "corrected"
    return hertz, "measured"


def validate_hertz(hertz: float, source: str) -> float:
    """Return a clock as it is; raises NoData where no CPU runs by such a clock."""
    if not PLAUSIBLE_HERTZ[0] <= hertz <= PLAUSIBLE_HERTZ[1]:
        raise NoData(f"{source}: {hertz:g} Hz is no CPU's clock", lack="invalid")
    return hertz


def read_first_clock(policy: Path, names: Iterable[str]) -> tuple[str, float]:
    """Read the first of these files that holds a clock; return its name and the hertz. Raises the last NoData."""
    refusal = NoData(f"{policy}: no clock")
    for name in names:
        try:
            return name, validate_hertz(read_number(policy / name, HERTZ_PER_KHZ), str(policy / name))
        except NoData as error:
            refusal = error
    raise refusal


def _read_policy(policy: Path, cpus: tuple[int, ...], cpu: Cpu) -> CpuClock:
    name, said = read_first_clock(policy, CLOCK_FILES)
    hertz, quality = correct_hertz(said, cpu)
    counted = name == COUNTED_CLOCK
    announced = "firmware" in cpu.sources or (cpu.driver_clock == "modelled" and not counted)
    return CpuClock(
        name=policy.name,
        cpus=cpus,
        hertz=hertz,
        source=f"cpufreq {name}",
        quality="modelled" if announced else quality,
    )


def _describe_absences(refusals: Mapping[str, NoData]) -> dict[str, Absent]:
    return {name: describe_absence(error) for name, error in refusals.items()}
