"""How many processors may be used: those of the affinity, fewer where a control group has a quota."""

from __future__ import annotations

import os
import subprocess  # noqa: TID251 - affinities are a process's own
import sys
from pathlib import Path

import pytest

from shared.runtime.cpus import count_usable_cpus

HERE = len(os.sched_getaffinity(0))
HALF = {"cpu.cfs_quota_us": "50000", "cpu.cfs_period_us": "100000"}


def group(root: Path, line: str, files: dict[str, str]) -> Path:
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "self" / "cgroup").write_text(line + "\n")
    for name, text in files.items():
        (root / "sys" / "fs" / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "sys" / "fs" / "cgroup" / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("line", "files", "count"),
    [
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "50000 100000"}, 1),
        ("0::/a/b", {"a/b/cpu.max": "max 100000"}, HERE),
        ("0::/../../outer", {"cpu.max": "20000 100000"}, 1),  # as a container without a namespace of its own sees it
        ("0::/", {"cpu.max": "6400000 100000"}, HERE),
        (
            "4:cpu,cpuacct:/x",
            {"cpu,cpuacct/x/cpu.cfs_quota_us": "50000", "cpu,cpuacct/x/cpu.cfs_period_us": "100000"},
            1,
        ),
        ("4:cpuacct,cpu:/x", {f"cpu/x/{name}": text for name, text in HALF.items()}, 1),
        ("4:cpu:/x", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, HERE),
        ("4:memory:/x", {"memory/x/cpu.max": "1 100000"}, HERE),
        ("garbage", {}, HERE),
    ],
)
def test_quotas(tmp_path, line, files, count):
    assert count_usable_cpus(group(tmp_path, line, files)) == count


def test_a_part_of_a_processor_more_counts_as_one(tmp_path):
    root = group(tmp_path, "0::/", {"cpu.max": "110000 100000"})
    assert count_usable_cpus(root) == min(HERE, 2)


def test_without_any_control_groups_the_affinity_counts(tmp_path):
    assert count_usable_cpus(tmp_path) == HERE
    code = "import os; os.sched_setaffinity(0, [0]); from shared.runtime.cpus import *; print(count_usable_cpus())"
    one = min(os.sched_getaffinity(0))
    command = [sys.executable, "-c", code.replace("[0]", f"[{one}]")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "1\n"  # noqa: S603
