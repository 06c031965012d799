"""A small disk of a test's own, which can be filled and made read-only."""

from __future__ import annotations

import os
import subprocess  # noqa: TID251 - mounts
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Disk:
    """Where it is mounted."""

    path: Path

    @property
    def free_bytes(self) -> int:
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def fill(self, leave_bytes: int = 0) -> None:
        """Take all its room, but for a few pages."""
        self.make_room()
        room = self.free_bytes - leave_bytes
        with (self.path / "fill").open("wb", buffering=0) as file, suppress(OSError):
            while room > 0:
                room -= file.write(bytes(min(room, 1 << 20)))

    def make_room(self) -> None:
        (self.path / "fill").unlink(missing_ok=True)

    def read_only(self, *, yes: bool) -> None:
        _call("mount", "-o", f"remount,{'ro' if yes else 'rw'}", self.path)


@contextmanager
def mounted(path: Path, size_mb: int = 4) -> Iterator[Disk]:
    """Mount a disk in memory while the block lasts; skip the test where that is not allowed."""
    if os.geteuid():
        pytest.skip("mounting a small disk needs root")
    path.mkdir()
    try:
        _call("mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "none", path)
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        pytest.skip(f"no disk in memory can be mounted here: {error}")
    try:
        yield Disk(path)
    finally:
        _call("umount", "--lazy", path)


def _call(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True, capture_output=True)  # noqa: S603 - ours
