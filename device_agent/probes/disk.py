"""Room on the disk: of the whole, and what is left to who is not root."""

from __future__ import annotations

import os
from pathlib import Path

from device_agent.hardware.files import LACKS
from device_agent.hardware.tools import LIVE
from device_agent.probes.base import Found, Probe
from device_agent.profile.schema import Profile
from shared.errors import NoData
from shared.protocol.measurements import Reading

USUAL = ("var/lib", "")
"""Where services keep their state: /var may be a disk of its own while / is read-only."""


def read(root: Path, profile: Profile, at: float) -> Found:
    """Return `disk.free_bytes` and `disk.total_bytes` of the disk that services keep their state on.

    Below another root there is none: the disk under a recorded board is not the board's.
    """
    if root != LIVE:
        raise NoData("a recorded board has no disk")
    return of_folder(next(root / name for name in USUAL if (root / name).is_dir()))(root, profile, at)


def of_folder(folder: Path) -> Probe:
    """Return the probe of the disk that holds a folder, for who knows where the state is."""

    def read(root: Path, profile: Profile, at: float) -> Found:
        try:
            disk = os.statvfs(folder)
        except OSError as error:
            raise NoData(f"{folder}: {error.strerror}", lack=LACKS.get(error.errno or 0, "invalid")) from error
        blocks = {"disk.free_bytes": disk.f_bavail, "disk.total_bytes": disk.f_blocks}
        return Found(
            readings={
                name: Reading(
                    value=count * disk.f_frsize, unit="bytes", source=f"statvfs {folder}", quality="measured", at=at
                )
                for name, count in blocks.items()
            }
        )

    return read
