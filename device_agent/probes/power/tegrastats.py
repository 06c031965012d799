"""What a Jetson's `tegrastats` prints, in every form that it had so far: the fallback where sysfs shows no rails."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import msgspec

from device_agent.hardware.tools import first_line
from device_agent.probes.power.rails import Ask, Rails
from shared.errors import NoData

COMMAND = ("tegrastats", "--interval", "100")
OFF_CELSIUS = -256.0

# Newest JetPacks print now/average/most, older ones now/average, with a unit or without; memory has MB behind it.
RAIL = re.compile(r"(?<!\S)([A-Za-z]\w*) (\d{1,9})(?:mW)?/\d+(?:mW)?(?:/\d+(?:mW)?)?(?!\S)", re.ASCII)
ZONE = re.compile(r"(?<!\S)([A-Za-z][\w-]*)@(-?\d{1,3}(?:\.\d{1,9})?)C(?:/-?\d+(?:\.\d+)?C)?(?!\S)", re.ASCII)
CPUS = re.compile(r"(?<!\S)CPU \[([^\]]*)\]")
CPU = re.compile(r"(\d{1,3})%@(\d{1,6})", re.ASCII)
RAM = re.compile(r"(?<!\S)RAM (\d{1,9})/(\d{1,9})([kMG])B", re.ASCII)
BYTES = {"k": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Cpu(msgspec.Struct, frozen=True):
    """One CPU that is online: busy as a share of 1, and its clock."""

    busy_ratio: float
    hertz: float


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """One line of it.

    Attributes:
        watts: By rail, now.
        celsius: By zone, without those that are off.
        cpus: By number; None for one that is off.
        ram_used_bytes: Of all processes together.
        ram_total_bytes: All there is.
    """

    watts: dict[str, float]
    celsius: dict[str, float]
    cpus: tuple[Cpu | None, ...]
    ram_used_bytes: int | None
    ram_total_bytes: int | None


def parse(line: str) -> Stats:
    """Return what a line says; what is not in it is not in the result either."""
    ram, cpus = RAM.search(line), CPUS.search(line)
    return Stats(
        watts={name: int(milliwatts) / 1e3 for name, milliwatts in RAIL.findall(line) if name != "NC"},
        celsius={name: float(figure) for name, figure in ZONE.findall(line) if float(figure) != OFF_CELSIUS},
        cpus=tuple(_cpu(word) for word in cpus[1].split(",")) if cpus else (),
        ram_used_bytes=int(ram[1]) * BYTES[ram[3]] if ram else None,
        ram_total_bytes=int(ram[2]) * BYTES[ram[3]] if ram else None,
    )


def find(root: Path) -> Ask:
    """Return what starts tegrastats, takes its first line and ends it."""

    def ask(labels: Collection[str] | None) -> Rails:
        watts = parse(first_line(root, *COMMAND)).watts
        if not watts:
            raise NoData("tegrastats names no rail")
        return Rails(watts=watts)

    return ask


def _cpu(word: str) -> Cpu | None:
    found = CPU.fullmatch(word.strip())
    return Cpu(busy_ratio=int(found[1]) / 100, hertz=int(found[2]) * 1e6) if found else None
