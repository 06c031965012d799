"""Parse a Jetson's `tegrastats`, in every form that it had so far: the fallback where sysfs shows no rails."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import msgspec

from device_agent.hardware.tools import read_first_line
from device_agent.probes.power.rails import RailReader, Rails
from shared.errors import NoData

COMMAND = ("tegrastats", "--interval", "100")
OFF_CELSIUS = -256.0

# Newest JetPacks print now/average/most, older ones now/average, with a unit or without; memory has MB behind it.
RAIL_FIGURE = re.compile(
    r"(?<!\S)([A-Za-z]\w*) (-?\d{1,9})(?:mW)?/-?\d{1,9}(?:mW)?(?:/-?\d{1,9}(?:mW)?)?(?!\S)", re.ASCII
)
ZONE_FIGURE = re.compile(r"(?<!\S)([A-Za-z][\w-]*)@(-?\d{1,3}(?:\.\d{1,9})?)C(?:/-?\d+(?:\.\d+)?C)?(?!\S)", re.ASCII)
CPU_LIST = re.compile(r"(?<!\S)CPU \[([^\]]*)\]")
CPU_FIGURE = re.compile(r"(\d{1,3})%@(\d{1,6})", re.ASCII)
RAM_FIGURE = re.compile(r"(?<!\S)RAM (\d{1,9})/(\d{1,9})([kMG])B", re.ASCII)
GPU_FIGURE = re.compile(
    r"(?<!\S)GR3D\d?_FREQ (?:(\d{1,3})%)?(?:@(?:\[(\d{1,6}(?:,\d{1,6}){0,15})\]|(\d{1,6})))?(?!\S)", re.ASCII
)
"""`0%`, `0%@76`, `63%@[621]`, one clock for each part of the GPU in brackets, and `@[1000]` without a load.

A GPU of two parts may have a `GR3D2_FREQ` besides.
"""
BYTES = {"k": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class CpuLoad(msgspec.Struct, frozen=True):
    """Load of a CPU that is online: busy as a share of 1, and its clock."""

    busy_ratio: float
    hertz: float


class TegraStats(msgspec.Struct, frozen=True, kw_only=True):
    """One line of tegrastats.

    Attributes:
        celsius: By zone, without those that are off.
        cpus: By number; None for one that is off.
        ram_used_bytes: Of all processes together.
        gpu_ratio: Load of the GPU's busiest part as a share of 1; None where it is not told.
        gpu_hertz: Mean clock of its parts that are on; 0 where it is off.
    """

    watts: dict[str, float]
    celsius: dict[str, float]
    cpus: tuple[CpuLoad | None, ...]
    ram_used_bytes: int | None
    ram_total_bytes: int | None
    gpu_ratio: float | None = None
    gpu_hertz: float | None = None


def parse_line(line: str) -> TegraStats:
    """Parse a line; what is not in it is not in the result either."""
    ram, cpus, parts = RAM_FIGURE.search(line), CPU_LIST.search(line), list(GPU_FIGURE.finditer(line))
    clocks = [int(word) for part in parts for word in (part[2] or part[3] or "").split(",") if word]
    running = [megahertz for megahertz in clocks if megahertz] or clocks
    loads = [int(part[1]) for part in parts if part[1] and int(part[1]) <= 100]  # noqa: PLR2004 - per cent
    return TegraStats(
        watts={name: int(milliwatts) / 1e3 for name, milliwatts in RAIL_FIGURE.findall(line) if name != "NC"},
        celsius={name: float(figure) for name, figure in ZONE_FIGURE.findall(line) if float(figure) != OFF_CELSIUS},
        cpus=tuple(_parse_cpu(word) for word in cpus[1].split(",")) if cpus else (),
        ram_used_bytes=int(ram[1]) * BYTES[ram[3]] if ram else None,
        ram_total_bytes=int(ram[2]) * BYTES[ram[3]] if ram else None,
        gpu_ratio=max(loads) / 100 if loads else None,
        gpu_hertz=sum(running) / len(running) * 1e6 if running else None,
    )


def open_sensor(root: Path) -> RailReader:
    """Return a reader that starts tegrastats, takes its first line and ends it."""

    def ask(labels: Collection[str] | None) -> Rails:
        watts = parse_line(read_first_line(root, *COMMAND)).watts
        if not watts:
            raise NoData("tegrastats names no rail")
        return Rails(watts=watts)

    return ask


def _parse_cpu(word: str) -> CpuLoad | None:
    found = CPU_FIGURE.fullmatch(word.strip())
    return CpuLoad(busy_ratio=int(found[1]) / 100, hertz=int(found[2]) * 1e6) if found else None
