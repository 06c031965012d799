"""Parser of Jetson `tegrastats` lines: the fallback if sysfs shows no rails."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import msgspec

from device_agent.hardware.tools import run_tool_first_line
from device_agent.probes.power.rails import RailReader, Rails
from shared.errors import NoData

COMMAND = ("tegrastats", "--interval", "100")
OFF_CELSIUS = -256.0

# New JetPacks print now/average/maximum, older ones now/average, with or without unit; memory is followed by MB.
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
"""`0%`, `0%@76`, `63%@[621]` with one clock per GPU part in brackets, and `@[1000]` without a load.

A GPU of two parts may have a `GR3D2_FREQ` too.
"""
BYTES = {"k": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class CpuLoad(msgspec.Struct, frozen=True):
    """Load of an online CPU: busy ratio (0 to 1) and clock."""

    busy_ratio: float
    hertz: float


class TegraStats(msgspec.Struct, frozen=True, kw_only=True):
    """One line of tegrastats.

    Attributes:
        celsius: By zone, without sensors that are off.
        cpus: By number; None for an offline CPU.
        gpu_ratio: Load of the busiest GPU part, 0 to 1.
        gpu_hertz: Mean clock of the GPU parts that are on; 0 if all are off.
    """

    watts: dict[str, float]
    celsius: dict[str, float]
    cpus: tuple[CpuLoad | None, ...]
    ram_used_bytes: int | None
    ram_total_bytes: int | None
    gpu_ratio: float | None = None
    gpu_hertz: float | None = None


def parse_line(line: str) -> TegraStats:
    """Parse a line; missing figures are missing or None in the result."""
    ram, cpus, parts = RAM_FIGURE.search(line), CPU_LIST.search(line), list(GPU_FIGURE.finditer(line))
    clocks = [int(number) for part in parts for number in (part[2] or part[3] or "").split(",") if number]
    running = [megahertz for megahertz in clocks if megahertz] or clocks
    loads = [int(part[1]) for part in parts if part[1] and int(part[1]) <= 100]  # noqa: PLR2004 - per cent
    return TegraStats(
        watts={name: int(milliwatts) / 1e3 for name, milliwatts in RAIL_FIGURE.findall(line) if name != "NC"},
        celsius={name: float(figure) for name, figure in ZONE_FIGURE.findall(line) if float(figure) != OFF_CELSIUS},
        cpus=tuple(_parse_cpu(entry) for entry in cpus[1].split(",")) if cpus else (),
        ram_used_bytes=int(ram[1]) * BYTES[ram[3]] if ram else None,
        ram_total_bytes=int(ram[2]) * BYTES[ram[3]] if ram else None,
        gpu_ratio=max(loads) / 100 if loads else None,
        gpu_hertz=sum(running) / len(running) * 1e6 if running else None,
    )


def open_sensor(root: Path) -> RailReader:
    """Open the sensor; a read starts tegrastats, takes its first line and ends it."""

    def ask(labels: Collection[str] | None) -> Rails:
        watts = parse_line(run_tool_first_line(root, COMMAND)).watts
        if not watts:
            raise NoData("tegrastats shows no rail")
        return Rails(watts=watts)

    return ask


def _parse_cpu(text: str) -> CpuLoad | None:
    match = CPU_FIGURE.fullmatch(text.strip())
    return CpuLoad(busy_ratio=int(match[1]) / 100, hertz=int(match[2]) * 1e6) if match else None
