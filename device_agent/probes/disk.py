"""Disk probe: size, and free space for unprivileged users."""

from __future__ import annotations

import os
from pathlib import Path

from device_agent.hardware.files import LACK_BY_ERRNO, is_folder
from device_agent.hardware.tools import LIVE_ROOT
from device_agent.probes.base import Probe, ProbeResult
from device_agent.profile.schema import Profile
from shared.errors import NoData
from shared.protocol.measurements import Reading

STATE_FOLDERS = ("var/lib", "")
"""Service state: /var may be a separate disk while / is read-only."""


def read(root: Path, profile: Profile, at: float) -> ProbeResult:
    """Read `disk.free_bytes` and `disk.total_bytes` of the disk that holds service state.

    A recorded board (a root other than `/`) has none: the disk below it is not the board's.
    """
    if root != LIVE_ROOT:
        raise NoData("a recorded board has no disk")
    return make_probe(next(root / name for name in STATE_FOLDERS if is_folder(root / name)))(root, profile, at)


def make_probe(folder: Path) -> Probe:
    """Make a probe of the disk that holds a folder."""

    def read(root: Path, profile: Profile, at: float) -> ProbeResult:
        try:
            disk = os.statvfs(folder)
        except OSError as error:
            raise NoData(f"{folder}: {error.strerror}", lack=LACK_BY_ERRNO.get(error.errno or 0, "invalid")) from error
        blocks = {"disk.free_bytes": disk.f_bavail, "disk.total_bytes": disk.f_blocks}
        return ProbeResult(
            readings={
                name: Reading(
                    value=count * disk.f_frsize, unit="bytes", source=f"statvfs {folder}", quality="measured", at=at
                )
                for name, count in blocks.items()
            }
        )

    return read
