"""CPU clocks from the Raspberry Pi firmware, cpufreq, /proc/cpuinfo or the profile.

Policies are read instead of cpu0, cpu1, … because an offline CPU has no folder. A Raspberry Pi's firmware throttles
without telling Linux: there cpufreq holds only the requested clock, and its figures count as modelled.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from device_agent.hardware import firmware
from device_agent.hardware.files import list_folder, read_text
from device_agent.probes.base import describe_absence, read_number
from device_agent.profile.schema import Cpu
from shared.errors import NoData
from shared.protocol.measurements import Absent, Quality
from shared.protocol.plausible import MAX_CPUS

CPU_FOLDER = "sys/devices/system/cpu"
POLICY_FOLDER = f"{CPU_FOLDER}/cpufreq"
CPUINFO = "proc/cpuinfo"
COUNTED_CLOCK = "cpuinfo_avg_freq"
CLOCK_FILES = (COUNTED_CLOCK, "cpuinfo_cur_freq", "scaling_cur_freq")
"""In order: counted by the cores; asked of the hardware (root only); last set by the driver, or counted on x86."""

PLAUSIBLE_HERTZ = (1e6, 2e10)
HERTZ_PER_KHZ, HERTZ_PER_MHZ = 1e3, 1e6
WORST_LAST: tuple[Quality, ...] = ("measured", "corrected", "modelled")
UNCERTAINTY: Mapping[Quality, float | None] = {"measured": 0.03, "corrected": 0.05, "modelled": None}
"""Relative standard deviation. Drivers and firmware were within 3 % of a cycle-counting loop on every recorded board,
except for the lowest clocks of Carmel cores, which a profile corrects."""


class CpuClock(msgspec.Struct, frozen=True, kw_only=True):
    """A clock and its CPUs; no CPUs means all that are online."""

    name: str
    cpus: tuple[int, ...] = ()
    hertz: float
    source: str
    quality: Quality


class ClockAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Clocks from one source, and the missing figures with their causes.

    Attributes:
        absent: Errors by the name of the figure.
        part: Why an existing clock could not be read; None if all were. No mean is computed from a part.
        covered: Text such as "4 of 6 CPUs" if some online CPUs have no clock; else empty.
    """

    clocks: tuple[CpuClock, ...]
    absent: dict[str, NoData] = {}
    part: Absent | None = None
    covered: str = ""


def read_clocks(root: Path, cpu: Cpu) -> ClockAnswer:
    """Read the clocks from the first source that has all of them, else the profile's nominal clock.

    Raises:
        NoData: No source answers and the profile has no nominal clock.
    """
    refusals: dict[str, NoData] = {}
    partial: ClockAnswer | None = None
    for source in cpu.sources:
        try:
            answer = read_source(source, root, cpu)
        except NoData as error:
            refusals[f"cpu.{source}_hertz"] = error
            continue
        if answer.part is None:
            return msgspec.structs.replace(answer, absent=refusals | answer.absent)
        partial = partial or answer
    if partial is not None:
        return msgspec.structs.replace(partial, absent=refusals | partial.absent)
    if not cpu.nominal_hertz:
        lacks = [error.lack for error in refusals.values() if error.lack != "not_present"]
        causes = "; ".join(str(error) for error in refusals.values())
        raise NoData(causes or "the profile names no clock", lack=lacks[0] if lacks else "not_present")
    nominal = CpuClock(name="nominal", hertz=cpu.nominal_hertz, source="profile", quality="modelled")
    return ClockAnswer(clocks=(nominal,), absent=refusals)


def read_source(source: str, root: Path, cpu: Cpu) -> ClockAnswer:
    """Read the clocks from one source; raises NoData."""
    match source:
        case "firmware":
            return read_firmware(root, cpu)
        case "cpufreq":
            return read_policies(root, cpu)
        case _:
            return read_cpuinfo(root)


def read_firmware(root: Path, cpu: Cpu) -> ClockAnswer:
    """Read the common CPU clock of a Raspberry Pi from its firmware; raises NoData."""
    del cpu
    hertz = validate_hertz(firmware.parse_clock_hertz(firmware.ask(root, "measure_clock arm")), "the firmware")
    return ClockAnswer(clocks=(CpuClock(name="arm", hertz=hertz, source="firmware", quality="measured"),))


def read_policies(root: Path, cpu: Cpu) -> ClockAnswer:
    """Read the clock of every cpufreq policy; raises NoData if none can be read."""
    clocks: list[CpuClock] = []
    missing: dict[str, NoData] = {}
    part: Absent | None = None
    refusal: NoData | None = None
    for policy in find_policies(root):
        try:
            cpus = read_text(policy / "affected_cpus")
            if not cpus:
                refusal = NoData(f"{policy}: all its CPUs are offline", lack="busy")
                missing[f"cpu.{policy.name}_hertz"] = refusal
                continue
            clocks.append(_read_policy(policy, parse_cpu_list(cpus), cpu))
        except NoData as error:
            refusal = missing[f"cpu.{policy.name}_hertz"] = error
            part = describe_absence(error)
    if not clocks:
        raise refusal or NoData(f"{root / POLICY_FOLDER}: no policy")
    uncovered, coverage = _compare_online(root, clocks)
    return ClockAnswer(clocks=tuple(clocks), absent=missing, part=part or uncovered, covered=coverage)


def _compare_online(root: Path, clocks: Iterable[CpuClock]) -> tuple[Absent | None, str]:
    """Compare the policies' CPUs with the online ones; return a contradiction, and a text if some lack a policy."""
    covered = [number for clock in clocks for number in clock.cpus]
    try:
        online = parse_cpu_list(read_text(root / CPU_FOLDER / "online"))
    except NoData as error:
        return (None if error.lack == "not_present" else describe_absence(error)), ""
    if len(covered) > len(set(covered)) or not set(covered) <= set(online):
        cause = f"{root / POLICY_FOLDER}: a CPU is offline, or in two policies"
        return Absent(lack="invalid", cause=cause), ""
    return None, "" if len(covered) == len(online) else f"{len(covered)} of {len(online)} CPUs"


def read_cpuinfo(root: Path) -> ClockAnswer:
    """Read each CPU's clock from /proc/cpuinfo (x86 only); raises NoData elsewhere.

    The kernel counts it (APERF over MPERF); in a virtual machine it is a constant set at boot, hence modelled.
    """
    content = read_text(root / CPUINFO)
    quality: Quality = "modelled" if re.search(r"^flags\b.*\bhypervisor\b", content, re.MULTILINE) else "measured"
    clocks: list[CpuClock] = []
    name, count = "", 0
    pattern = r"^(processor|cpu MHz)[ \t]*:[ \t]*([0-9]{1,6}(?:\.[0-9]{1,6})?)$"
    for key, value in re.findall(pattern, content, re.MULTILINE):
        if key == "processor":
            name, count = value, count + 1
            continue
        hertz = validate_hertz(float(value) * HERTZ_PER_MHZ, CPUINFO)
        clocks.append(
            CpuClock(name=f"cpu{name}", cpus=parse_cpu_list(name), hertz=hertz, source=CPUINFO, quality=quality)
        )
    if not clocks:
        raise NoData(f"{root / CPUINFO}: no `cpu MHz`")
    lacking = Absent(lack="invalid", cause=f"{CPUINFO}: clocks of {len(clocks)} of {count} processors only")
    return ClockAnswer(clocks=tuple(clocks), part=None if len(clocks) == count else lacking)


def find_policies(root: Path) -> list[Path]:
    """List the policy folders in numerical order; raises NoData if access is denied."""
    return list_folder(root / POLICY_FOLDER, "policy[0-9]*")


def read_online_count(root: Path) -> tuple[int, str]:
    """Count the online CPUs; return the number and its source file. Raises NoData."""
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
            raise NoData(f"{content[:40]!r} is not a CPU list", lack="invalid")
        numbers += range(first, last + 1)
    return tuple(numbers)


def correct_hertz(hertz: float, cpu: Cpu) -> tuple[float, Quality]:
    """Correct a low clock by the profile's factor, since some drivers report too much; return it with its quality."""
    if cpu.low_opp_correction != 1 and hertz < cpu.low_opp_hertz:
        return hertz * cpu.low_opp_correction, "corrected"
    return hertz, "measured"


def validate_hertz(hertz: float, source: str) -> float:
    """Return a plausible clock unchanged; raises NoData for another."""
    if not PLAUSIBLE_HERTZ[0] <= hertz <= PLAUSIBLE_HERTZ[1]:
        raise NoData(f"{source}: {hertz:g} Hz is not a plausible CPU clock", lack="invalid")
    return hertz


def read_first_clock(policy: Path, names: Iterable[str]) -> tuple[str, float]:
    """Return name and hertz of the first file that holds a clock; raises the last NoData."""
    refusal = NoData(f"{policy}: no clock")
    for name in names:
        try:
            return name, validate_hertz(read_number(policy / name, HERTZ_PER_KHZ), str(policy / name))
        except NoData as error:
            refusal = error
    raise refusal


def _read_policy(policy: Path, cpus: tuple[int, ...], cpu: Cpu) -> CpuClock:
    name, raw_hertz = read_first_clock(policy, CLOCK_FILES)
    hertz, quality = correct_hertz(raw_hertz, cpu)
    counted = name == COUNTED_CLOCK
    announced = "firmware" in cpu.sources or (cpu.driver_clock == "modelled" and not counted)
    return CpuClock(
        name=policy.name,
        cpus=cpus,
        hertz=hertz,
        source=f"cpufreq {name}",
        quality="modelled" if announced else quality,
    )
