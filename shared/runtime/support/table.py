"""Select the wheels that fit this system from the support table."""

from __future__ import annotations

import os
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from shared.errors import ConfigError

FOLDER = Path(__file__).parent
Purpose: TypeAlias = Literal["train", "infer", "server"]

PACKAGES = {"train": "PyTorch and ONNX Runtime", "infer": "ONNX Runtime", "server": "PyTorch, CVXPY and ONNX"}
LEAST_MEMORY_MB = {"train": 900, "infer": 350, "server": 1500}
"""Least memory of the whole system: importing torch takes 250 MB, and a step of a small network as much again."""

MIB = 1 << 20
IS_64_BIT = sys.maxsize > 1 << 32


class Wheel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of a package index.

    Attributes:
        bytes: Size of the file; 0 where unknown.
        unpacked: Size of its content in bytes.
        sha256: Hexadecimal hash of the file.
    """

    file: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*\.whl$")]
    bytes: int
    unpacked: int
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]

    @property
    def name(self) -> str:
        """Name of the distribution, normalised by PEP 503."""
        return re.sub(r"[-_.]+", "-", self.file.split("-")[0]).lower()

    @property
    def version(self) -> str:
        """Version of the distribution."""
        return self.file.split("-")[1]


class WheelSet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Wheel files for each purpose on one kind of system; empty where a purpose is not supported."""

    train: tuple[str, ...] = ()
    infer: tuple[str, ...] = ()
    server: tuple[str, ...] = ()


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kind of system.

    Attributes:
        machine: Accepted outputs of `uname -m`.
        python: Python version; empty for any.
        l4t: Major version of Jetson's system; 0 for other systems.
        lacks: Missing CPU feature: `atomics` for ARMv8.0.
        wheels: Name of the set that fits; empty where none does.
        refused: Reason why no set fits, and the remedy.
        index: Address of an index with files that pip's own index lacks for this row.
        worker: Version of the system's Python that these wheels are for; empty for the agent's own.
        gpu: Whether these wheels compute on the board's GPU.
        note: Further advice for the user.
        tested: Kind of test that this row had.
    """

    systems: str
    machine: tuple[str, ...]
    python: str = ""
    l4t: int = 0
    lacks: str = ""
    wheels: str = ""
    refused: str = ""
    index: str = ""
    worker: str = ""
    gpu: bool = False
    note: str = ""
    tested: Literal["real", "emulated", "recorded", "not yet"] = "not yet"


class SupportTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All kinds of systems; the first match counts."""

    row: tuple[Row, ...]


class WheelFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All wheels, and sets of them by name."""

    wheels: tuple[Wheel, ...]
    sets: dict[str, WheelSet]

    def take(self, name: str, purpose: Purpose) -> tuple[Wheel, ...]:
        """Return a set's wheels for a purpose, the largest last."""
        files: tuple[str, ...] = getattr(self.sets[name], purpose)
        return tuple(sorted((wheel for wheel in self.wheels if wheel.file in files), key=lambda wheel: wheel.bytes))


@dataclass(frozen=True)
class System:
    """Facts that decide which wheels fit.

    Attributes:
        machine: Output of `uname -m`; for a 32-bit Python on a 64-bit kernel the 32-bit name.
        python: Version such as 3.11.
        l4t: Major version of Jetson's system; 0 for other systems.
        lacks: `atomics` on a 64-bit ARM processor without these instructions.
    """

    machine: str
    python: str
    l4t: int = 0
    lacks: str = ""

    def fits(self, row: Row) -> bool:
        """Check whether a row is for this kind of system, regardless of its Python."""
        return self.machine in row.machine and row.l4t == self.l4t and row.lacks in ("", self.lacks)


@dataclass(frozen=True)
class Choice:
    """Wheels selected for a system.

    Attributes:
        wheels: Sorted by size, the largest last.
        interpreter: Path of the Python that they are for.
    """

    row: Row
    wheels: tuple[Wheel, ...]
    interpreter: str = ""

    @property
    def bytes(self) -> int:
        """Total size of all files."""
        return sum(wheel.bytes for wheel in self.wheels)

    @property
    def unpacked_bytes(self) -> int:
        """Total size of all contents, in bytes."""
        return sum(wheel.unpacked for wheel in self.wheels)


def read_table() -> SupportTable:
    """Read the support table of this version."""
    return msgspec.toml.decode((FOLDER / "table.toml").read_bytes(), type=SupportTable)


def read_wheels() -> WheelFile:
    """Read the wheel list of this version."""
    return msgspec.toml.decode((FOLDER / "wheels.toml").read_bytes(), type=WheelFile)


def this_system(root: Path = Path("/")) -> System:
    """Detect this system; the Jetson version is read below `root`."""
    machine = platform.machine()
    if machine == "aarch64" and not IS_64_BIT:
        machine = "armv8l"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return System(machine, python, read_l4t(root), read_missing_feature(root) if machine == "aarch64" else "")


def read_missing_feature(root: Path) -> str:
    """Return `atomics` if a CPU of the board lacks them, since libraries then die by SIGILL; else empty."""
    try:
        text = (root / "proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return ""
    features = re.findall(r"^Features\s*:(.*)$", text, re.MULTILINE)
    return "" if all("atomics" in line.split() for line in features) else "atomics"


def read_l4t(root: Path) -> int:
    """Read the major version of Jetson's system, by `# R36 (release), REVISION: ...`; 0 for other systems."""
    try:
        text = (root / "etc/nv_tegra_release").read_text(errors="replace")
    except OSError:
        return 0
    match = re.match(r"# R(\d+) ", text)
    return int(match[1]) if match else 0


def find_row(table: SupportTable, system: System) -> Row:
    """Find the row of a system.

    Raises:
        ConfigError: There is none.
    """
    for row in table.row:
        if system.fits(row) and row.python in ("", system.python):
            return row
    pythons = sorted({row.python for row in table.row if system.fits(row)} - {""})
    kind = f"{system.machine} with Python {system.python}" + (f" and L4T {system.l4t}" if system.l4t else "")
    remedy = f"use Python {' or '.join(pythons)}" if pythons else "use a system of deploy/SUPPORT.md"
    raise ConfigError(f"{kind} is not supported; {remedy}")


def choose(table: SupportTable, wheels: WheelFile, system: System, purpose: Purpose) -> Choice:
    """Select the wheels of a system for a purpose.

    Raises:
        ConfigError: None fit, with the reason.
    """
    row = find_row(table, system)
    if row.refused:
        raise ConfigError(f"{row.systems}: {row.refused}")
    chosen = wheels.take(row.wheels, purpose)
    if not chosen:
        raise ConfigError(f"{row.systems}: the server needs Python 3.11 or newer; the agent runs here")
    return Choice(row, chosen, f"/usr/bin/python{row.worker or system.python}")


def require_memory(purpose: Purpose, total_bytes: int | None = None) -> None:
    """Refuse a system with too little memory; `total_bytes` defaults to its own.

    Raises:
        ConfigError: It has too little.
    """
    if total_bytes is None:
        total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    least = LEAST_MEMORY_MB[purpose]
    if total_bytes < least * MIB:
        other = "`device-agent setup infer` fits a board of 512 MB; " if purpose == "train" else ""
        raise ConfigError(
            f"{PACKAGES[purpose]} need {least} MB of memory and this system has {total_bytes // MIB}; "
            f"{other}--anyway tries regardless"
        )
