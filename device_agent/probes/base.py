"""Probe interface and its reading of files: whatever a sensor does, the answer is a figure or a named lack."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import msgspec

from device_agent.hardware.bounds import is_plausible
from device_agent.hardware.files import read_text
from device_agent.profile.schema import Profile
from shared.errors import NoData
from shared.protocol.measurements import Absent, Reading

log = logging.getLogger(__name__)

WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,20}")
"""As the kernel writes one: neither `1_000` nor other alphabets' digits, which int() takes."""


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
    return parse_number(read_text(path), path) * scale


def parse_number(content: str, path: Path) -> int:
    """Return the integer that a text is; raises NoData, which names the file that it is of, where it is none."""
    if WHOLE_NUMBER.fullmatch(content) is None:
        raise NoData(f"{path}: {content[:40]!r} is no whole number", lack="invalid")
    return int(content)


def read_within(path: Path, bounds: tuple[float, float], scale: float = 1.0) -> float:
    """Return the integer that a file holds, times `scale`.

    Args:
        bounds: Least and most that it can be, scaled.
        scale: What one of the file's units is.

    Raises:
        NoData: As `read_number`, or where the figure cannot be.
    """
    value = read_number(path, scale)
    if not bounds[0] <= value <= bounds[1]:
        raise NoData(f"{path}: {value:g} cannot be, it is {bounds[0]:g} to {bounds[1]:g} everywhere", lack="invalid")
    return value


def run_probe(probe: Probe, root: Path, profile: Profile, at: float) -> ProbeResult:
    """Run a probe; a figure that cannot be is an absence, and so is one that is not finite.

    Args:
        root: The board's root folder.
        at: Monotonic seconds of the readings.

    Raises:
        NoData: It has nothing at all, or fails in a way of its own, which is logged: a board with an odd sensor keeps
            its other figures.
    """
    try:
        found = probe(root, profile, at)
    except NoData:
        raise
    except Exception as error:
        log.debug("probe %s fails", getattr(probe, "__module__", probe), exc_info=True)
        raise NoData(f"{type(error).__name__}: {error}", lack="invalid") from error
    untrue = {
        name: Absent(lack="invalid", cause=f"{one.source}: {one.value:g} {one.unit} cannot be")
        for name, one in found.readings.items()
        if not is_plausible(name, one.value)
    }
    if not untrue:
        return found
    kept = {name: one for name, one in found.readings.items() if name not in untrue}
    return ProbeResult(readings=kept, absent=found.absent | untrue, facts=found.facts)


def describe_absence(error: NoData) -> Absent:
    """Return an error as a report's absence."""
    return Absent(lack=error.lack, cause=str(error))
