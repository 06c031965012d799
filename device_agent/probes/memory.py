"""Memory probe: what the board has, and what cgroups and the kernel leave to this process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

import msgspec

from device_agent.hardware.files import read_text
from device_agent.probes.base import ProbeResult, describe_absence, read_number
from device_agent.profile.schema import Profile
from shared.errors import NoData
from shared.protocol.measurements import Absent, Reading

MEMINFO = "proc/meminfo"
PRESSURE = "proc/pressure/memory"
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
    """Limit of a control group and the room that is left below it, in bytes."""

    limit: float
    room: float
    source: str


def read(root: Path, profile: Profile, at: float) -> ProbeResult:
    """Read `memory.total_bytes`, `memory.available_bytes`, `memory.limit_bytes` and `memory.pressure_ratio`.

    Available is the least of what the kernel would still give and the room in every control group around this
    process. A limit is there only where one is below the total.

    Args:
        root: The board's root folder.
        profile: Its firmware profile.
        at: Monotonic seconds of the readings.
    """
    readings: dict[str, Reading] = {}
    missing: dict[str, Absent] = {}
    board = parse_meminfo(read_text(root / MEMINFO))
    total = board.get("MemTotal")
    if not total:
        raise NoData(f"{root / MEMINFO}: tells no MemTotal", lack="invalid")
    readings["memory.total_bytes"] = _make_reading(total, MEMINFO, at)
    limits = [one for one in read_limits(root) if one.limit < total]
    if limits:
        least = min(limits, key=lambda one: one.limit)
        readings["memory.limit_bytes"] = _make_reading(least.limit, least.source, at)
    rooms = {one.source: one.room for one in limits}
    if "MemAvailable" in board:
        rooms[MEMINFO] = board["MemAvailable"]
    if rooms:
        source = min(rooms, key=lambda name: rooms[name])
        readings["memory.available_bytes"] = _make_reading(rooms[source], source, at)
    else:
        missing["memory.available_bytes"] = Absent(lack="not_present", cause=f"{MEMINFO}: tells no MemAvailable")
    try:
        stalled = parse_pressure(read_text(root / PRESSURE))
        readings["memory.pressure_ratio"] = Reading(
            value=stalled, unit="ratio", source=PRESSURE, quality="measured", at=at
        )
    except NoData as error:
        missing["memory.pressure_ratio"] = describe_absence(error)
    return ProbeResult(readings=readings, absent=missing)


def parse_meminfo(content: str) -> dict[str, float]:
    """Parse bytes by name out of /proc/meminfo, which lists them in KiB."""
    lines = re.findall(r"^(\w+):\s+([0-9]{1,15}) kB\s*$", content, re.MULTILINE)
    return {name: float(kib) * BYTES_PER_KIB for name, kib in lines}


def parse_pressure(content: str) -> float:
    """Parse the share of the last ten seconds in which some process waited for memory; raises NoData."""
    found = re.search(r"^some avg10=([0-9]{1,3}(?:\.[0-9]{1,4})?) ", content, re.MULTILINE)
    if found is None or not float(found[1]) <= 100:  # noqa: PLR2004 - per cent
        raise NoData(f"{content[:40]!r} is no memory pressure", lack="invalid")
    return float(found[1]) / 100


def read_limits(root: Path) -> Iterator[MemoryLimit]:
    """Yield the limits of the own control group and of every one around it, innermost first."""
    try:
        own = read_text(root / OWN_CGROUP)
    except NoData:
        return
    for mount, path, files in parse_cgroups(own):
        for folder in dict.fromkeys([path, *path.parents, PurePosixPath()]):
            try:
                yield _read_limit(root, mount / folder, files)
            except NoData:
                continue


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


def _read_limit(root: Path, group: PurePosixPath, files: CgroupFiles) -> MemoryLimit:
    """Return the limit of one group; raises NoData where it has none. Cache of files gives way, so it is room too."""
    folder = root / group
    limits: list[float] = []
    for name in files.limits:
        with suppress(NoData):  # a file may say `max`
            limits.append(read_number(folder / name))
    if not limits:
        raise NoData(f"{folder}: no limit")
    used = read_number(folder / files.usage)
    reclaimable = 0.0
    with suppress(NoData):
        found = re.search(rf"^{files.reclaimable} ([0-9]{{1,20}})$", read_text(folder / "memory.stat"), re.MULTILINE)
        reclaimable = float(found[1]) if found else 0.0
    room = max(0.0, min(limits) - max(0.0, used - reclaimable))
    return MemoryLimit(limit=min(limits), room=room, source=str(group / files.limits[0]))


def _make_reading(value: float, source: str, at: float) -> Reading:
    return Reading(value=value, unit="bytes", source=source, quality="measured", at=at)
