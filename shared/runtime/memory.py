"""Memory that this process may still take: of its own limit, of its control group's, and of the machine's."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path

from shared.errors import ConfigError

SHARE = 0.8
"""Of the machine's memory: what is left is for the system and the agent."""
MIB = 1 << 20
MAX_EXPANSION, FREE_BYTES = 250, 256 * MIB
"""Bytes in memory for one of a compressed file, beyond a size that harms nobody: real data is far from it."""
_STATM, _GROUP, _GROUPS = Path("/proc/self/statm"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_OOM_SCORE = Path("/proc/self/oom_score_adj")
_RESIDENT, _DATA = 1, 5
"""Columns of statm."""


def usual_limit() -> int:
    """Return the bytes that a process of ours may take where nobody set another limit: four fifths of the board's."""
    return int(SHARE * min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_group_limits()]))


def limit_data(limit: int) -> None:
    """Have the system refuse this process memory beyond `limit` bytes, or beyond what it was allowed before."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def die_first() -> None:
    """Where memory runs out, have the kernel end this process, whose work can be done again, and not who started it."""
    with suppress(OSError):  # no Linux
        _OOM_SCORE.write_text("500")


def bytes_left() -> int:
    """Return how many bytes this process may take yet; zero or less where it has reached its limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    left = usual_limit() - _used(_RESIDENT)
    return left if soft == resource.RLIM_INFINITY else min(left, soft - _used(_DATA))


def resident_bytes() -> int:
    """Return how many bytes of memory this process holds."""
    return _used(_RESIDENT)


def require_room(count: int, path: Path) -> None:
    """Refuse what would not fit in memory, before any is taken for it.

    Args:
        count: Bytes that are needed.
        path: What they are for.

    Raises:
        ConfigError: Fewer are left.
    """
    if count > (left := bytes_left()):
        raise ConfigError(
            f"{path}: out of memory: it takes {count / MIB:.0f} MiB, and {max(0, left) / MIB:.0f} MiB are left to this "
            "process; make it smaller, or raise trainer.memory_mb of an agent"
        )


def require_expansion(count: int, stored: int, path: Path, remedy: str) -> None:
    """Refuse a file of which few bytes stand for many, before it is decompressed.

    Args:
        count: Bytes of what it holds.
        stored: Bytes that it takes on the disk.
        path: Of the file, for the error.
        remedy: What to do with data that are that uniform.

    Raises:
        ConfigError: It holds more than 256 MiB, and more than 250 times what it takes.
    """
    if count > FREE_BYTES and count > MAX_EXPANSION * stored:
        sizes = f"{count / MIB:.0f} MiB in {stored / MIB:.1f} MiB"
        raise ConfigError(
            f"{path}: holds {sizes}, more than {MAX_EXPANSION} times as much, as no real data do; {remedy}"
        )


def _used(column: int) -> int:
    try:
        return int(_STATM.read_text().split()[column]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0  # no Linux


def _group_limits() -> list[int]:
    """Return the limits of this process's control group and those above it, in bytes."""
    try:
        group = next(line for line in _GROUP.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return []
    place = _GROUPS / group.removeprefix("0::").lstrip("/")
    limits = []
    for folder in (place, *place.parents):
        if not folder.is_relative_to(_GROUPS):
            break
        try:
            limits.append(int((folder / "memory.max").read_text()))
        except (OSError, ValueError):
            continue  # the root has none, and "max" is no limit
    return limits
