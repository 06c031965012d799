"""Memory probe: total, available, cgroup limit, swap and pressure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

import msgspec

from device_agent.hardware.files import read_text
from device_agent.probes.base import ProbeResult, describe_absence, parse_number, read_within
from device_agent.profile.schema import Profile
from shared.errors import NoData
from shared.protocol.measurements import Absent, Reading
from shared.protocol.plausible import COUNTER_BYTES, MEMORY_BYTES

MEMINFO = "proc/meminfo"
PRESSURE = "proc/pressure/memory"
UNLIMITED = "max"
OWN_CGROUP = "proc/self/cgroup"
BYTES_PER_KIB = 1024


class CgroupFiles(msgspec.Struct, frozen=True):
    """File names of a cgroup version; `reclaimable` is the field of memory.stat with the reclaimable page cache."""

    limits: tuple[str, ...]
    usage: str
    reclaimable: str


CGROUP_V1 = CgroupFiles(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
CGROUP_V2 = CgroupFiles(("memory.max", "memory.high"), "memory.current", "inactive_file")


class MemoryLimit(msgspec.Struct, frozen=True):
    """Limit of a control group in bytes, and the room below it, or why that is unknown."""

    limit: float
    room: float | Absent
    source: str


def read(root: Path, profile: Profile, at: float) -> ProbeResult:
    """Read `memory.total_bytes`, `memory.available_bytes`, `memory.limit_bytes`, swap, and `memory.pressure_ratio`.

    Available is the minimum of MemAvailable and the room in every enclosing control group; it is absent if one of
    these is unknown. The limit is present only if it is below the total. Without swap, both swap figures are 0.
    """
    readings: dict[str, Reading] = {}
    missing: dict[str, Absent] = {}
    board = parse_meminfo(read_text(root / MEMINFO))
    total = board.get("MemTotal", 0.0)
    if not MEMORY_BYTES[0] <= total <= MEMORY_BYTES[1]:
        raise NoData(f"{root / MEMINFO}: MemTotal is missing or implausible", lack="invalid")
    readings["memory.total_bytes"] = _make_reading(total, MEMINFO, at)
    unreadable: Absent | None = None
    try:
        limits = [limit for limit in read_limits(root) if limit.limit < total]
    except NoData as error:
        limits, unreadable = [], describe_absence(error)
        missing["memory.limit_bytes"] = unreadable
    if limits:
        least = min(limits, key=lambda limit: limit.limit)
        readings["memory.limit_bytes"] = _make_reading(least.limit, least.source, at)
    available = unreadable or _find_available(board, limits, at)
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
    """Return the minimum of MemAvailable and the room below all limits, or why it is unknown."""
    if "MemAvailable" not in board:
        return Absent(lack="not_present", cause=f"{MEMINFO}: no MemAvailable")
    if board["MemAvailable"] > board["MemTotal"]:
        return Absent(lack="invalid", cause=f"{MEMINFO}: MemAvailable is more than MemTotal")
    least = _make_reading(board["MemAvailable"], MEMINFO, at)
    for limit in limits:
        if isinstance(limit.room, Absent):
            return limit.room
        if limit.room < least.value:
            least = _make_reading(limit.room, limit.source, at)
    return least


def _add_swap(board: Mapping[str, float], readings: dict[str, Reading], missing: dict[str, Absent], at: float) -> None:
    names = ("memory.swap_total_bytes", "memory.swap_used_bytes")
    total, free = board.get("SwapTotal"), board.get("SwapFree")
    if total is None or free is None:
        missing |= dict.fromkeys(names, Absent(lack="not_present", cause=f"{MEMINFO}: no SwapTotal or SwapFree"))
    elif not free <= total <= MEMORY_BYTES[1]:
        cause = f"{MEMINFO}: {free:g} of {total:g} bytes of swap free is implausible"
        missing |= dict.fromkeys(names, Absent(lack="invalid", cause=cause))
    else:
        readings[names[0]] = _make_reading(total, MEMINFO, at)
        readings[names[1]] = _make_reading(total - free, MEMINFO, at)


def parse_meminfo(content: str) -> dict[str, float]:
    """Parse /proc/meminfo (KiB) into bytes by name."""
    lines = re.findall(r"^(\w{1,80}):[ \t]+([0-9]{1,20}) kB[ \t\r]*$", content, re.MULTILINE)
    return {name: float(kib) * BYTES_PER_KIB for name, kib in lines}


def parse_pressure(content: str) -> float:
    """Parse the share of the last 10 s in which some process waited for memory; raises NoData."""
    match = re.search(r"^some avg10=([0-9]{1,3}(?:\.[0-9]{1,4})?) ", content, re.MULTILINE)
    if match is None or not float(match[1]) <= 100:  # noqa: PLR2004 - per cent
        raise NoData(f"{content[:40]!r} is not a memory pressure", lack="invalid")
    return float(match[1]) / 100


def read_limits(root: Path) -> Iterator[MemoryLimit]:
    """Yield the limits of this process's control group and all enclosing ones, innermost first.

    Raises:
        NoData: A limit exists and cannot be read, so that the minimum is unknown.
    """
    try:
        content = read_text(root / OWN_CGROUP)
    except NoData as error:
        if error.lack == "not_present":
            return
        raise
    for mount, path, files in parse_cgroups(content):
        for folder in dict.fromkeys([path, *path.parents, PurePosixPath()]):
            if limit := _read_limit(root, mount / folder, files):
                yield limit


def parse_cgroups(content: str) -> Iterator[tuple[PurePosixPath, PurePosixPath, CgroupFiles]]:
    """Yield mount point, path and file names of the memory control groups in /proc/self/cgroup.

    In a container the path may be the host's and not exist: the mount root is the process's group then. A path outside
    its namespace ("/..") cannot be read.
    """
    for line in content.splitlines():
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
    """Return the limit of a group, None if it has none; raises NoData if it is unreadable or implausible."""
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
                raise NoData(f"{folder / name}: {limits[name]:g} bytes is not a plausible limit", lack="invalid")
    if not limits:
        return None
    source = min(limits, key=lambda name: limits[name])
    try:
        room: float | Absent = max(0.0, limits[source] - _read_used(folder, files))
    except NoData as error:
        room = describe_absence(error)
    return MemoryLimit(limit=limits[source], room=room, source=str(group / source))


def _read_used(folder: Path, files: CgroupFiles) -> float:
    """Return a group's usage without reclaimable page cache; raises NoData."""
    used = read_within(folder / files.usage, COUNTER_BYTES)
    match = re.search(rf"^{files.reclaimable} ([0-9]{{1,20}})$", read_text(folder / "memory.stat"), re.MULTILINE)
    if match is None:
        raise NoData(f"{folder / 'memory.stat'}: no {files.reclaimable}", lack="invalid")
    return max(0.0, used - float(match[1]))


def _make_reading(value: float, source: str, at: float) -> Reading:
    return Reading(value=value, unit="bytes", source=source, quality="measured", at=at)
