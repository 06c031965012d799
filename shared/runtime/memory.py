"""Memory limits and usage of this process: rlimit, control group, machine."""

from __future__ import annotations

import functools
import os
import resource
from contextlib import suppress
from pathlib import Path

from shared.errors import ConfigError

SHARE = 0.8
"""Share of the machine's memory; the remainder is for the system and the agent."""
MIB = 1 << 20
MAX_EXPANSION, FREE_BYTES = 250, 256 * MIB
"""Largest ratio of decompressed to compressed bytes, beyond a harmless size; real data is far below it."""
_STATM, _GROUP, _GROUPS = Path("/proc/self/statm"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_OOM_SCORE = Path("/proc/self/oom_score_adj")
_RESIDENT, _DATA = 1, 5
"""Columns of statm."""


@functools.cache  # asked before every allocation
def default_limit() -> int:
    """Return the default memory limit of a process in bytes: four fifths of the board's or the control group's."""
    return int(SHARE * min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_group_limits()]))


def limit_data(limit: int) -> None:
    """Limit this process's data segment to `limit` bytes, or to a lower existing limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def prefer_oom_kill() -> None:
    """Let the OOM killer prefer this process, whose work can be repeated, to its parent."""
    with suppress(OSError):  # not Linux
        _OOM_SCORE.write_text("500")


def available_bytes() -> int:
    """Return the bytes that this process may still allocate; zero or less at its limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    available = default_limit() - _memory_usage(_RESIDENT)
    return available if soft == resource.RLIM_INFINITY else min(available, soft - _memory_usage(_DATA))


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return _memory_usage(_RESIDENT)


def require_room(count: int, path: Path) -> None:
    """Refuse data that does not fit in memory, before allocating any.

    Args:
        count: Number of bytes needed.

    Raises:
        ConfigError: Less memory is available.
    """
    if count > (available := available_bytes()):
        raise ConfigError(
            f"{path}: out of memory: it takes {count / MIB:.0f} MiB, and {max(0, available) / MIB:.0f} MiB are left "
            "to this process; make it smaller, or raise trainer.memory_mb of an agent"
        )


def require_expansion(count: int, stored: int, path: Path, remedy: str) -> None:
    """Refuse a decompression bomb before it is decompressed.

    Args:
        count: Size after decompression, in bytes.
        stored: Size of the compressed file, in bytes.
        remedy: Advice for legitimate data that is this uniform.

    Raises:
        ConfigError: It has more than 256 MiB, and more than 250 times its compressed size.
    """
    if count > FREE_BYTES and count > MAX_EXPANSION * stored:
        sizes = f"{count / MIB:.0f} MiB in {stored / MIB:.1f} MiB"
        raise ConfigError(f"{path}: holds {sizes}, more than {MAX_EXPANSION} times as much, unlike real data; {remedy}")


def _memory_usage(column: int) -> int:
    try:
        return int(_STATM.read_text().split()[column]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0  # not Linux


def _group_limits() -> list[int]:
    """Return the memory limits of this process's control group and its parents, in bytes."""
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
            continue  # the root has no limit, and "max" means none
    return limits
