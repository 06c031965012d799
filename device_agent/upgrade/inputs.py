"""Inputs of an upgrade: paths and platform of the board, and the request."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from device_agent.hardware.tools import run_command
from device_agent.upgrade.record import HOME, UpgradeTarget
from shared.runtime.clock import Clock, monotonic

ROOTS = Path("/etc/fieldfleet/upgrades.pem")
STATE_DIR = Path("/var/lib/fieldfleet")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
ARCHES = {"x86_64": "amd64", "aarch64": "arm64"}
START_S = 60.0
"""Timeout for `upgrade status` of a new version."""


def find_start_error(folder: Path) -> str:
    """Run `upgrade status` of a version; return why it fails, empty if the version starts and could be upgraded."""
    arguments = ("-I", "-m", "device_agent", "upgrade", "status", "--home", str(folder.parent))
    result = run_command([str(folder / "bin/python3"), *arguments], timeout_s=START_S)
    if result.exit_code == 0:
        return ""
    lines = (result.stderr or result.stdout).strip().splitlines()[-1:] or ["no output"]
    return f"version {folder.name} does not start: {lines[0][:200]}"


@dataclass(frozen=True)
class UpgradeEnvironment:
    """Paths and platform of a board.

    Attributes:
        home: Folder of the versions.
        roots: PEM file with the root certificates of the sites whose packages are accepted.
        boot_id: Kernel file whose content changes at every boot.
        arch: Processor architecture in dpkg's terms.
        python: Python version that packages must bring libraries for.
        interpreters: Interpreters that a version's `bin/python3` may link to.
        find_start_error: Returns why the version in a folder does not start; else empty.
        look_s: Poll interval in seconds.
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
    find_start_error: Callable[[Path], str] = find_start_error
    clock: Clock = monotonic
    look_s: float = 0.5


@dataclass(frozen=True)
class UpgradeRequest:
    """Request to install a version.

    Attributes:
        read_manifest: Returns the signed manifest.
        read_package: Returns the package, read up to the given number of bytes.
        by_hand: True if an operator at the board asks, who may also downgrade.
        force: Interrupt a running task.
        lose: Set aside state files that the version cannot read.
    """

    target: UpgradeTarget
    read_manifest: Callable[[], bytes]
    read_package: Callable[[int], bytes]
    by_hand: bool = False
    force: bool = False
    lose: bool = False
