"""Probe interface, and helpers that read numbers from sysfs files.

A failing sensor costs only its own figures: each figure is a reading or an absence with its cause.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import msgspec

from device_agent.hardware.files import read_text
from device_agent.profile.schema import Profile
from shared.errors import NoData
from shared.protocol.measurements import Absent, Reading
from shared.protocol.plausible import is_plausible

log = logging.getLogger(__name__)

WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,20}")
"""Integer as the kernel writes it; int() would also accept `1_000` and non-ASCII digits."""


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """Readings, absences and facts of a probe.

    Attributes:
        readings: By name; a name ends in its unit, as in `cpu.policy0_hertz`.
        absent: Expected figures that cannot be read, by the same names.
        facts: Values that are not numbers, such as a governor.
    """

    readings: dict[str, Reading] = {}
    absent: dict[str, Absent] = {}
    facts: dict[str, str] = {}


Probe: TypeAlias = Callable[[Path, Profile, float], ProbeResult]
"""`read(root, profile, at)`: stateless, reads only below `root`; raises NoData if the board has none of its figures."""


def read_number(path: Path, scale: float = 1.0) -> float:
    """Return the integer in a file, times `scale`; raises NoData."""
    return parse_number(read_text(path), path) * scale


def parse_number(content: str, path: Path) -> int:
    """Parse an integer; raises NoData that names the file."""
    if WHOLE_NUMBER.fullmatch(content) is None:
        raise NoData(f"{path}: {content[:40]!r} is not an integer", lack="invalid")
    return int(content)


def read_within(path: Path, bounds: tuple[float, float], scale: float = 1.0) -> float:
    """Return the integer in a file, times `scale`; raises NoData if it is missing or out of bounds.

    Args:
        bounds: Least and greatest plausible value, after scaling.
    """
    value = read_number(path, scale)
    if not bounds[0] <= value <= bounds[1]:
        raise NoData(f"{path}: {value:g} is out of range ({bounds[0]:g} to {bounds[1]:g})", lack="invalid")
    return value


def run_probe(probe: Probe, root: Path, profile: Profile, at: float) -> ProbeResult:
    """Run a probe; implausible and non-finite readings become absences.

    Raises:
        NoData: The probe has no figure, or raised another exception. That one is logged, so that a board with an odd
            sensor keeps its other figures.
    """
    try:
        result = probe(root, profile, at)
    except NoData:
        raise
    except Exception as error:
        log.debug("probe %s fails", getattr(probe, "__module__", probe), exc_info=True)
        raise NoData(f"{type(error).__name__}: {error}", lack="invalid") from error
    implausible = {
        name: Absent(lack="invalid", cause=f"{reading.source}: {reading.value:g} {reading.unit} is implausible")
        for name, reading in result.readings.items()
        if not is_plausible(name, reading.value)
    }
    if not implausible:
        return result
    plausible = {name: reading for name, reading in result.readings.items() if name not in implausible}
    return ProbeResult(readings=plausible, absent=result.absent | implausible, facts=result.facts)


def describe_absence(error: NoData) -> Absent:
    """Convert an error into the absence of a report."""
    return Absent(lack=error.lack, cause=str(error))
