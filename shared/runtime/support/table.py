"""Choose the wheels for a system: the table, the system's facts, and the row that fits. Pure but for `this_system`."""

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

HERE = Path(__file__).parent
Purpose: TypeAlias = Literal["train", "infer", "server"]

WANTED = {"train": "PyTorch and ONNX Runtime", "infer": "ONNX Runtime", "server": "PyTorch, CVXPY and ONNX"}
LEAST_MEMORY_MB = {"train": 900, "infer": 350, "server": 1500}
"""Of the whole system: importing torch takes 250 MB, and a step of a small network as much again."""

MIB = 1 << 20
IS_64_BIT = sys.maxsize > 1 << 32


class Wheel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of an index.

    Attributes:
        bytes: Its size; 0 where it is not known.
        unpacked: Bytes that its content takes.
        sha256: Of the file, hexadecimal.
    """

    file: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*\.whl$")]
    bytes: int
    unpacked: int
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]

    @property
    def name(self) -> str:
        """Its distribution's name, as PEP 503 compares it."""
        return re.sub(r"[-_.]+", "-", self.file.split("-")[0]).lower()

    @property
    def version(self) -> str:
        """Its distribution's version."""
        return self.file.split("-")[1]


class WheelSet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The files of the wheels that each purpose takes on one kind of system; none for what is not possible there."""

    train: tuple[str, ...] = ()
    infer: tuple[str, ...] = ()
    server: tuple[str, ...] = ()


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kind of system.

    Attributes:
        machine: As `uname -m` prints it.
        python: Its version; empty for any.
        l4t: Major version of Jetson's system; 0 for what is no Jetson.
        lacks: What its processor does not have: `atomics` for those of ARMv8.0.
        wheels: The set that fits; empty where none does.
        refused: Why none does, and what to do.
        index: Address of the index with what pip's own index lacks for this row.
        worker: The system's Python that these wheels are for, where that is not the agent's; empty where it is.
        gpu: Whether these wheels compute on the board's GPU.
        note: What else is to be known.
        tested: How it was tried.
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
    """All kinds of systems, of which the first that fits counts."""

    row: tuple[Row, ...]


class WheelFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All wheels, and the sets by name."""

    wheels: tuple[Wheel, ...]
    sets: dict[str, WheelSet]

    def take(self, name: str, purpose: Purpose) -> tuple[Wheel, ...]:
        """Return the wheels of a set that a purpose takes, the largest last."""
        files: tuple[str, ...] = getattr(self.sets[name], purpose)
        return tuple(sorted((one for one in self.wheels if one.file in files), key=lambda one: one.bytes))


@dataclass(frozen=True)
class System:
    """What decides which wheels fit.

    Attributes:
        machine: As `uname -m` prints it; of a 32-bit Python on a 64-bit kernel that of its own word.
        python: Such as 3.11.
        l4t: Major version of Jetson's system; 0 for what is no Jetson.
        lacks: `atomics` on a 64-bit ARM whose processor does not have these instructions.
    """

    machine: str
    python: str
    l4t: int = 0
    lacks: str = ""

    def fits(self, row: Row) -> bool:
        """Return whether a row is of this kind of system, whatever its Python."""
        return self.machine in row.machine and row.l4t == self.l4t and row.lacks in ("", self.lacks)


@dataclass(frozen=True)
class Choice:
    """What a system is given.

    Attributes:
        wheels: The files, the largest last.
        interpreter: The Python that they are for.
    """

    row: Row
    wheels: tuple[Wheel, ...]
    interpreter: str = ""

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(one.bytes for one in self.wheels)

    @property
    def unpacked(self) -> int:
        """Bytes of all that they hold."""
        return sum(one.unpacked for one in self.wheels)


def read_table() -> SupportTable:
    """Return the table of this version."""
    return msgspec.toml.decode((HERE / "table.toml").read_bytes(), type=SupportTable)


def read_wheels() -> WheelFile:
    """Return the wheels of this version."""
    return msgspec.toml.decode((HERE / "wheels.toml").read_bytes(), type=WheelFile)


def this_system(root: Path = Path("/")) -> System:
    """Return what this process runs on; below another root, what its files say of a Jetson."""
    machine = platform.machine()
    if machine == "aarch64" and not IS_64_BIT:
        machine = "armv8l"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return System(machine, python, read_l4t(root), read_lack(root) if machine == "aarch64" else "")


def read_lack(root: Path) -> str:
    """Return `atomics` where a CPU of the board has none, of which libraries die by SIGILL; empty where all have."""
    try:
        text = (root / "proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return ""
    told = re.findall(r"^Features\s*:(.*)$", text, re.MULTILINE)
    return "" if all("atomics" in line.split() for line in told) else "atomics"


def read_l4t(root: Path) -> int:
    """Return the major version of Jetson's system, by `# R36 (release), REVISION: ...`; 0 where it is none."""
    try:
        text = (root / "etc/nv_tegra_release").read_text(errors="replace")
    except OSError:
        return 0
    found = re.match(r"# R(\d+) ", text)
    return int(found[1]) if found else 0


def find_row(table: SupportTable, system: System) -> Row:
    """Return the row of a system.

    Raises:
        ConfigError: There is none.
    """
    for row in table.row:
        if system.fits(row) and row.python in ("", system.python):
            return row
    pythons = sorted({row.python for row in table.row if system.fits(row)} - {""})
    kind = f"{system.machine} with Python {system.python}" + (f" and L4T {system.l4t}" if system.l4t else "")
    remedy = f"use Python {' or '.join(pythons)}" if pythons else "use a system of deploy/SUPPORT.md"
    raise ConfigError(f"nothing is known to run on {kind}; {remedy}")


def choose(table: SupportTable, wheels: WheelFile, system: System, purpose: Purpose) -> Choice:
    """Return the wheels that a system takes for a purpose.

    Args:
        table: Of all kinds of systems.

    Raises:
        ConfigError: None fit, and why.
    """
    row = find_row(table, system)
    if row.refused:
        raise ConfigError(f"{row.systems}: {row.refused}")
    chosen = wheels.take(row.wheels, purpose)
    if not chosen:
        raise ConfigError(f"{row.systems}: the server needs Python 3.11 or newer; the agent runs here")
    return Choice(row, chosen, f"/usr/bin/python{row.worker or system.python}")


def require_memory(purpose: Purpose, total_bytes: int | None = None) -> None:
    """Refuse a system that would be killed for want of memory; `total_bytes` is its own where it is None.

    Raises:
        ConfigError: It has too little.
    """
    if total_bytes is None:
        total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    least = LEAST_MEMORY_MB[purpose]
    if total_bytes < least * MIB:
        other = "`device-agent setup infer` fits a board of 512 MB; " if purpose == "train" else ""
        raise ConfigError(
            f"{WANTED[purpose]} want {least} MB of memory and this system has {total_bytes // MIB}; "
            f"{other}--anyway tries all the same"
        )
