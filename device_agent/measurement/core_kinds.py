"""Detect mixed CPU core types, which differ in energy per cycle."""

from __future__ import annotations

import re
from pathlib import Path

from device_agent.hardware.files import find_paths, path_exists, read_text_or
from device_agent.probes.base import read_number
from device_agent.probes.clocks import CPU_FOLDER, CPUINFO, POLICY_FOLDER
from shared.errors import NoData

HYBRID_X86 = "sys/devices/cpu_atom"
"""Performance counters of efficiency cores; absent on processors with one kind of core."""
SAME_SHARE = 0.1
"""Equal cores differ by less than this in capacity and clock, such as a turbo's favoured cores."""
CPU_PART = re.compile(r"^CPU (?:implementer|part)\s*:\s*(0x[0-9a-f]{1,8})\s*$", re.MULTILINE)


def describe_core_kinds(root: Path) -> str:
    """Describe how the cores of the board below `root` differ; empty if they are of one kind or nothing is known."""
    codes = CPU_PART.findall(read_text_or(root / CPUINFO))
    parts = sorted(set(zip(codes[::2], codes[1::2], strict=False)))
    if len(parts) > 1:
        return f"CPU parts {', '.join(part for _, part in parts)}"
    if path_exists(root / HYBRID_X86):
        return "performance and efficiency cores"
    capacities = _read_numbers(root, f"{CPU_FOLDER}/cpu[0-9]*/cpu_capacity")
    if _is_spread(capacities):
        return f"capacities {min(capacities):.0f} to {max(capacities):.0f}"
    megahertz = [1e-3 * khz for khz in _read_numbers(root, f"{POLICY_FOLDER}/policy[0-9]*/cpuinfo_max_freq")]
    return f"clocks up to {min(megahertz):.0f} and {max(megahertz):.0f} MHz" if _is_spread(megahertz) else ""


def _is_spread(values: list[float]) -> bool:
    return bool(values) and min(values) < (1 - SAME_SHARE) * max(values)


def _read_numbers(root: Path, pattern: str) -> list[float]:
    numbers = []
    for path in find_paths(root, pattern):
        try:
            numbers.append(read_number(path))
        except NoData:
            continue
    return numbers
