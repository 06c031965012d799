"""How many processors this process may use: those of its affinity, and of the quotas of its control groups."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path


def count_usable_cpus(root: Path = Path("/")) -> int:
    """Return how many threads of this process can run at the same time, at least one; half a CPU counts as one.

    Args:
        root: Where `proc` and `sys` are.
    """
    present = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([present, *(math.ceil(quota) for quota in _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """Yield the CPUs that this process's control groups and those above them allow, of versions 1 and 2."""
    groups = root / "sys" / "fs" / "cgroup"
    try:
        lines = (root / "proc" / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            yield from _walk(groups, path, _quota_2)
        elif "cpu" in (names := controllers.split(",")):
            for name in {",".join(names), "cpu"}:
                yield from _walk(groups / name, path, _quota_1)


def _walk(top: Path, path: str, read: Callable[[Path], tuple[int, int]]) -> Iterator[float]:
    """Yield what `read` finds in a group's folder and all above it; in a container the path may be the host's."""
    place = top / path.lstrip("/")
    for folder in (place, *place.parents):
        if not folder.is_relative_to(top):
            return
        try:
            quota, period = read(folder)
            if quota > 0 and period > 0:
                yield quota / period
        except (OSError, ValueError):
            continue  # there is none, or "max" is no limit


def _quota_2(folder: Path) -> tuple[int, int]:
    quota, period = (folder / "cpu.max").read_text().split()
    return int(quota), int(period)


def _quota_1(folder: Path) -> tuple[int, int]:
    return int((folder / "cpu.cfs_quota_us").read_text()), int((folder / "cpu.cfs_period_us").read_text())
