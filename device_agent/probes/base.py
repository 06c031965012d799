"""Probe interface and its reading of files: whatever a sensor does, the answer is a figure or a named lack."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import msgspec

from device_agent.hardware.files import read_text
from device_agent.profile.schema import Profile
from shared.errors import NoData
from shared.protocol.measurements import Absent, Reading


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """Readings, absences and facts of a probe.

    Attributes:
        readings: By name, which ends in its unit: `cpu.policy0_hertz`.
        absent: Figures that should be there and are not, by the same names.
        facts: What is no figure.
    """

    readings: dict[str, Reading] = {}
    absent: dict[str, Absent] = {}
    facts: dict[str, str] = {}


Probe: TypeAlias = Callable[[Path, Profile, float], ProbeResult]
"""`read(root, profile, at)`: reads below `root` only, keeps nothing; raises NoData where there is nothing at all."""


def read_number(path: Path, scale: float = 1.0) -> float:
    """Return the integer that a file holds, times `scale`; raises NoData as `read_text`, or where it holds none."""
    content = read_text(path)
    try:
        return int(content) * scale
    except (ValueError, OverflowError):
        raise NoData(f"{path}: {content[:40]!r} is no whole number", lack="invalid") from None


def describe_absence(error: NoData) -> Absent:
    """Return an error as a report's absence."""
    return Absent(lack=error.lack, cause=str(error))
