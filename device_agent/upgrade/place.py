"""What an upgrade is given: where everything is on a board, which version is wanted, and whether that one starts."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from device_agent.hardware.tools import run_command
from device_agent.upgrade.record import HOME, UpgradeTarget

ROOTS = Path("/etc/fieldfleet/upgrades.pem")
STATE_DIR = Path("/var/lib/fieldfleet")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
ARCHES = {"x86_64": "amd64", "aarch64": "arm64"}
START_S = 60.0
"""Seconds in which a version must be able to say which it is."""


@dataclass(frozen=True)
class UpgradeEnvironment:
    """Where an upgrade finds everything.

    Attributes:
        home: Folder of the versions.
        roots: Root certificates of the sites whose packages are taken, PEM.
        boot_id: File of the kernel, another for every boot.
        arch: As dpkg calls this processor.
        python: Whose libraries the packages bring.
        interpreters: To one of which a version's own leads: the system's, whichever it is, or this very one.
    """

    home: Path = HOME
    state_dir: Path = STATE_DIR
    roots: Path = ROOTS
    boot_id: Path = BOOT_ID
    arch: str = ARCHES.get(platform.machine(), platform.machine())
    python: str = f"{sys.version_info.major}.{sys.version_info.minor}"
    interpreters: tuple[str, ...] = (
        "/usr/bin/python3",
        f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}",
    )


@dataclass(frozen=True)
class UpgradeRequest:
    """A version that is wanted, and by whom.

    Attributes:
        signed: Returns its signed manifest.
        package: Returns its package, of which so many bytes are looked at.
        by_hand: Whether somebody at the board wants it, who may also go to an older one.
        force: Whether a task may be ended for it.
        lose: Whether state files that it cannot read are set aside.
    """

    target: UpgradeTarget
    read_manifest: Callable[[], bytes]
    read_package: Callable[[int], bytes]
    by_hand: bool = False
    force: bool = False
    lose: bool = False


def find_fault(folder: Path) -> str:
    """Return why a version does not even start, or could not be upgraded from; empty where it does, and could."""
    arguments = ("-I", "-m", "device_agent", "upgrade", "status", "--home", str(folder.parent))
    result = run_command([str(folder / "bin/python3"), *arguments], timeout_s=START_S)
    if result.exit_code == 0:
        return ""
    lines = (result.stderr or result.stdout).strip().splitlines()[-1:] or ["it says nothing"]
    return f"version {folder.name} does not start: {lines[0][:200]}"
