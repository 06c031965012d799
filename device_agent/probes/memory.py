"""Memory: what the board has, and what this process may still take before the kernel kills it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

import msgspec

from device_agent.hardware.files import text
from device_agent.probes.base import Found, absent, number
from device_agent.profile.schema import Profile
from shared.errors import NoData
from shared.protocol.measurements import Absent, Reading

MEMINFO = "proc/meminfo"
PRESSURE = "proc/pressure/memory"
OWN_CGROUP = "proc/self/cgroup"
BYTES_PER_KIB = 1024


class Files(msgspec.Struct, frozen=True):
    """How a version of cgroups names its files; the last is the field of memory.stat that the kernel drops at need."""

    limits: tuple[str, ...]
    usage: str
    reclaimable: str


V1 = Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
V2 = Files(("memory.max", "memory.high"), "memory.current", "inactive_file")


class Limit(msgspec.Struct, frozen=True):
    """What a control group may have, and what of it is still to be had, in bytes."""

    limit: float
    room: float
    source: str


def read(root: Path, profile: Profile, at: float) -> Found:
    """Return `memory.total_bytes`, `memory.available_bytes`, `memory.limit_bytes` and `memory.pressure_ratio`.

    Available is the least of what the kernel would still give and the room in every control group around this
    process. A limit is there only where one is below the total.
    """
    readings: dict[str, Reading] = {}
    missing: dict[str, Absent] = {}
    board = meminfo(text(root / MEMINFO))
    total = board.get("MemTotal")
    if not total:
        raise NoData(f"{root / MEMINFO}: tells no MemTotal", lack="invalid")
    readings["memory.total_bytes"] = _reading(total, MEMINFO, at)
    limits = [one for one in limits_around(root) if one.limit < total]
    if limits:
        least = min(limits, key=lambda one: one.limit)
        readings["memory.limit_bytes"] = _reading(least.limit, least.source, at)
    rooms = {one.source: one.room for one in limits}
    if "MemAvailable" in board:
        rooms[MEMINFO] = board["MemAvailable"]
    if rooms:
        source = min(rooms, key=lambda name: rooms[name])
        readings["memory.available_bytes"] = _reading(rooms[source], source, at)
    else:
        missing["memory.available_bytes"] = Absent(lack="not_present", cause=f"{MEMINFO}: tells no MemAvailable")
    try:
        stalled = pressure(text(root / PRESSURE))
        readings["memory.pressure_ratio"] = Reading(
            value=stalled, unit="ratio", source=PRESSURE, quality="measured", at=at
        )
    except NoData as error:
        missing["memory.pressure_ratio"] = absent(error)
    return Found(readings=readings, absent=missing)


def meminfo(content: str) -> dict[str, float]:
    """Return bytes by name, as /proc/meminfo lists them in KiB."""
    lines = re.findall(r"^(\w+):\s+([0-9]{1,15}) kB\s*$", content, re.MULTILINE)
    return {name: float(kib) * BYTES_PER_KIB for name, kib in lines}


def pressure(content: str) -> float:
    """Return the share of the last ten seconds in which some process waited for memory; raises NoData."""
    found = re.search(r"^some avg10=([0-9]{1,3}(?:\.[0-9]{1,4})?) ", content, re.MULTILINE)
    if found is None or not float(found[1]) <= 100:  # noqa: PLR2004 - per cent
        raise NoData(f"{content[:40]!r} is no memory pressure", lack="invalid")
    return float(found[1]) / 100


def limits_around(root: Path) -> Iterator[Limit]:
    """Return the limits of the own control group and of every one around it, innermost first."""
    try:
        own = text(root / OWN_CGROUP)
    except NoData:
        return
    for mount, path, files in hierarchies(own):
        for folder in dict.fromkeys([path, *path.parents, PurePosixPath()]):
            try:
                yield _limit(root, mount / folder, files)
            except NoData:
                continue


def hierarchies(own: str) -> Iterator[tuple[PurePosixPath, PurePosixPath, Files]]:
    """Return where control groups of memory are mounted, and the process' own path there, out of /proc/self/cgroup.

    In a container the path may be the host's and not there: the mount's root is then its own group. What lies outside
    of its namespace ("/..") cannot be read at all.
    """
    for line in own.splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        inside = PurePosixPath(path.lstrip("/"))
        if ".." in inside.parts:
            inside = PurePosixPath()
        if "memory" in controllers.split(","):
            yield PurePosixPath("sys/fs/cgroup/memory"), inside, V1
        elif not controllers:
            yield PurePosixPath("sys/fs/cgroup"), inside, V2
            yield PurePosixPath("sys/fs/cgroup/unified"), inside, V2


def _limit(root: Path, group: PurePosixPath, files: Files) -> Limit:
    """Return the limit of one group; raises NoData where it has none. Cache of files gives way, so it is room too."""
    folder = root / group
    limits: list[float] = []
    for name in files.limits:
        with suppress(NoData):  # a file may say `max`
            limits.append(number(folder / name))
    if not limits:
        raise NoData(f"{folder}: no limit")
    used = number(folder / files.usage)
    reclaimable = 0.0
    with suppress(NoData):
        found = re.search(rf"^{files.reclaimable} ([0-9]{{1,20}})$", text(folder / "memory.stat"), re.MULTILINE)
        reclaimable = float(found[1]) if found else 0.0
    room = max(0.0, min(limits) - max(0.0, used - reclaimable))
    return Limit(limit=min(limits), room=room, source=str(group / files.limits[0]))


def _reading(value: float, source: str, at: float) -> Reading:
    return Reading(value=value, unit="bytes", source=source, quality="measured", at=at)
