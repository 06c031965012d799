"""Count the CPUs usable by this process: affinity and cgroup quotas (v1 and v2)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path


def count_usable_cpus(root: Path = Path("/")) -> int:
    """Count the threads of this process that can run at the same time, at least one; half a CPU counts as one.

    Args:
        root: Folder that contains `proc` and `sys`.
    """
    present = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([present, *(math.ceil(quota) for quota in _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """Yield the CPU quotas of this process's control groups and their parents, of versions 1 and 2."""
    groups = root / "sys" / "fs" / "cgroup"
    try:
        lines = (root / "proc" / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            yield from _walk_groups(groups, path, _read_quota_v2)
        elif "cpu" in (names := controllers.split(",")):
            for name in {",".join(names), "cpu"}:
                yield from _walk_groups(groups / name, path, _read_quota_v1)


def _walk_groups(top: Path, path: str, read: Callable[[Path], tuple[int, int]]) -> Iterator[float]:
    """Yield the quotas of a group and all its parents; in a container the path may be the host's."""
    place = top / path.lstrip("/")
    for folder in (place, *place.parents):
        if not folder.is_relative_to(top):
            return
        try:
            quota, period = read(folder)
            if quota > 0 and period > 0:
                yield quota / period
        except (OSError, ValueError):
            continue  # no quota, or "max" for no limit


def _read_quota_v2(folder: Path) -> tuple[int, int]:
    quota, period = (folder / "cpu.max").read_text().split()
    return int(quota), int(period)


def _read_quota_v1(folder: Path) -> tuple[int, int]:
    return int((folder / "cpu.cfs_quota_us").read_text()), int((folder / "cpu.cfs_period_us").read_text())
