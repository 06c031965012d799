"""Memory probe: what the board has, and what cgroups and the kernel leave to this process."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

import msgspec

from device_agent.hardware.bounds import COUNTER_BYTES, MEMORY_BYTES
from device_agent.hardware.files import read_text
from device_agent.probes.base import ProbeResult, describe_absence, parse_number, read_within
from device_agent.profile.schema import Profile
from shared.errors import NoData
from shared.protocol.measurements import Absent, Reading

MEMINFO = "proc/meminfo"
PRESSURE = "proc/pressure/memory"
UNLIMITED = "max"
OWN_CGROUP = "proc/self/cgroup"
BYTES_PER_KIB = 1024


class CgroupFiles(msgspec.Struct, frozen=True):
    """File names of a version of cgroups; the last is the field of memory.stat that the kernel drops at need."""

    limits: tuple[str, ...]
    usage: str
    reclaimable: str


CGROUP_V1 = CgroupFiles(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
CGROUP_V2 = CgroupFiles(("memory.max", "memory.high"), "memory.current", "inactive_file")


class MemoryLimit(msgspec.Struct, frozen=True):
    """Limit of a control group and the room that is left below it, in bytes, or why it is not known."""

    limit: float
    room: float | Absent
    source: str


def read(root: Path, profile: Profile, at: float) -> ProbeResult:
    """Read `memory.total_bytes`, `memory.available_bytes`, `memory.limit_bytes`, swap, and `memory.pressure_ratio`.

    Available is the least of what the kernel would still give and the room in every control group around this
    process; where one of these is not known, neither is the least of them. A limit is there only where one is below
    the total. `memory.swap_total_bytes` is 0 on a board without swap, `memory.swap_used_bytes` then likewise.

    Args:
        root: The board's root folder.
        at: Monotonic seconds of the readings.
    """
    readings: dict[str, Reading] = {}
    missing: dict[str, Absent] = {}
    board = parse_meminfo(read_text(root / MEMINFO))
    total = board.get("MemTotal", 0.0)
    if not MEMORY_BYTES[0] <= total <= MEMORY_BYTES[1]:
        raise NoData(f"{root / MEMINFO}: tells no MemTotal that a board has", lack="invalid")
    readings["memory.total_bytes"] = _make_reading(total, MEMINFO, at)
    refused: Absent | None = None
    try:
        limits = [one for one in read_limits(root) if one.limit < total]
    except NoData as error:
        limits, refused = [], describe_absence(error)
        missing["memory.limit_bytes"] = refused
    if limits:
        least = min(limits, key=lambda one: one.limit)
        readings["memory.limit_bytes"] = _make_reading(least.limit, least.source, at)
    available = refused or _find_available(board, limits, at)
    if isinstance(available, Absent):
        missing["memory.available_bytes"] = available
    else:
        readings["memory.available_bytes"] = available
    _add_swap(board, readings, missing, at)
    try:
        stalled = parse_pressure(read_text(root / PRESSURE))
        readings["memory.pressure_ratio"] = Reading(
            value=stalled, unit="ratio", source=PRESSURE, quality="measured", at=at
        )
    except NoData as error:
        missing["memory.pressure_ratio"] = describe_absence(error)
    return ProbeResult(readings=readings, absent=missing)


def _find_available(board: Mapping[str, float], limits: Sequence[MemoryLimit], at: float) -> Reading | Absent:
    """Return the least of what the kernel would give and the rooms below all limits, or why it is not known."""
    if "MemAvailable" not in board:
        return Absent(lack="not_present", cause=f"{MEMINFO}: tells no MemAvailable")
    if board["MemAvailable"] > board["MemTotal"]:
        return Absent(lack="invalid", cause=f"{MEMINFO}: MemAvailable is more than MemTotal")
    least = _make_reading(board["MemAvailable"], MEMINFO, at)
    for one in limits:
        if isinstance(one.room, Absent):
            return one.room
        if one.room < least.value:
            least = _make_reading(one.room, one.source, at)
    return least


def _add_swap(board: Mapping[str, float], readings: dict[str, Reading], missing: dict[str, Absent], at: float) -> None:
    names = ("memory.swap_total_bytes", "memory.swap_used_bytes")
    total, free = board.get("SwapTotal"), board.get("SwapFree")
    if total is None or free is None:
        missing |= dict.fromkeys(names, Absent(lack="not_present", cause=f"{MEMINFO}: tells no SwapTotal or SwapFree"))
    elif not free <= total <= MEMORY_BYTES[1]:
        cause = f"{MEMINFO}: {free:g} of {total:g} bytes of swap cannot be free"
        missing |= dict.fromkeys(names, Absent(lack="invalid", cause=cause))
    else:
        readings[names[0]] = _make_reading(total, MEMINFO, at)
        readings[names[1]] = _make_reading(total - free, MEMINFO, at)


def parse_meminfo(content: str) -> dict[str, float]:
    """Parse bytes by name out of /proc/meminfo, which lists them in KiB."""
    lines = re.findall(r"^(\w{1,80}):[ \t]+([0-9]{1,20}) kB[ \t\r]*$", content, re.MULTILINE)
    return {name: float(kib) * BYTES_PER_KIB for name, kib in lines}


def parse_pressure(content: str) -> float:
    """Parse the share of the last ten seconds in which some process waited for memory; raises NoData."""
    found = re.search(r"^some avg10=([0-9]{1,3}(?:\.[0-9]{1,4})?) ", content, re.MULTILINE)
    if found is None or not float(found[1]) <= 100:  # noqa: PLR2004 - per cent
        raise NoData(f"{content[:40]!r} is no memory pressure", lack="invalid")
    return float(found[1]) / 100


def read_limits(root: Path) -> Iterator[MemoryLimit]:
    """Yield the limits of the own control group and of every one around it, innermost first.

    Raises:
        NoData: A limit is there and cannot be read, so that the least one is not known.
    """
    try:
        own = read_text(root / OWN_CGROUP)
    except NoData as error:
        if error.lack == "not_present":
            return
        raise
    for mount, path, files in parse_cgroups(own):
        for folder in dict.fromkeys([path, *path.parents, PurePosixPath()]):
            if limit := _read_limit(root, mount / folder, files):
                yield limit


def parse_cgroups(own: str) -> Iterator[tuple[PurePosixPath, PurePosixPath, CgroupFiles]]:
    """Yield where control groups of memory are mounted, and the process' own path there, out of /proc/self/cgroup.

    In a container the path may be the host's and not there: the mount's root is then its own group. What lies outside
    of its namespace ("/..") cannot be read at all.
    """
    for line in own.splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        inside = PurePosixPath(path.lstrip("/"))
        if ".." in inside.parts:
            inside = PurePosixPath()
        if "memory" in controllers.split(","):
            yield PurePosixPath("sys/fs/cgroup/memory"), inside, CGROUP_V1
        elif not controllers:
            yield PurePosixPath("sys/fs/cgroup"), inside, CGROUP_V2
            yield PurePosixPath("sys/fs/cgroup/unified"), inside, CGROUP_V2


def _read_limit(root: Path, group: PurePosixPath, files: CgroupFiles) -> MemoryLimit | None:
    """Return the limit of one group, None where it has none; raises NoData where it cannot be read, or cannot be."""
    folder = root / group
    limits: dict[str, float] = {}
    for name in files.limits:
        try:
            content = read_text(folder / name)
        except NoData as error:
            if error.lack == "not_present":
                continue
            raise
        if content != UNLIMITED:
            limits[name] = parse_number(content, folder / name)
            if not MEMORY_BYTES[0] <= limits[name] <= COUNTER_BYTES[1]:
                raise NoData(f"{folder / name}: {limits[name]:g} bytes are no limit", lack="invalid")
    if not limits:
        return None
    source = min(limits, key=lambda name: limits[name])
    try:
        room: float | Absent = max(0.0, limits[source] - _read_used(folder, files))
    except NoData as error:
        room = describe_absence(error)
    return MemoryLimit(limit=limits[source], room=room, source=str(group / source))


def _read_used(folder: Path, files: CgroupFiles) -> float:
    """Return what a group uses without cache of files, which gives way at need; raises NoData."""
    used = read_within(folder / files.usage, COUNTER_BYTES)
    found = re.search(rf"^{files.reclaimable} ([0-9]{{1,20}})$", read_text(folder / "memory.stat"), re.MULTILINE)
    if found is None:
        raise NoData(f"{folder / 'memory.stat'}: tells no {files.reclaimable}", lack="invalid")
    return max(0.0, used - float(found[1]))


def _make_reading(value: float, source: str, at: float) -> Reading:
    return Reading(value=value, unit="bytes", source=source, quality="measured", at=at)
