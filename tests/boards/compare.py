"""Hold what the probes make of a board against what is expected of it."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from device_agent.measurement.board import run_probes
from device_agent.probes import PROBES
from device_agent.probes.base import ProbeResult
from device_agent.profile.load import load_for_board

TOTAL = "power.total_watts"
EXACT, OF_TOTAL = 1e-6, 0.01
"""Relative tolerances: of a figure, for what recordings round; of the total, which may be corrected."""


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """What is expected of one board.

    Attributes:
        profile: Id of the profile that must be chosen.
        given: Id of the profile to use where the board's files do not tell.
        absent: Lacks by name of figure, or of a whole probe.
        modelled: Figures that must be modelled if they are there, whatever their value.
        none: Figures that must neither be there nor be missed.
    """

    profile: str = ""
    given: str = ""
    readings: dict[str, float] = {}
    absent: dict[str, str] = {}
    facts: dict[str, str] = {}
    modelled: tuple[str, ...] = ()
    none: tuple[str, ...] = ()


class Line(msgspec.Struct, frozen=True):
    """One comparison, as words."""

    what: str
    expected: str
    got: str
    same: bool


def load(path: Path) -> dict[str, Expected]:
    """Read the table of expectations."""
    return {unit: msgspec.convert(_sorted(entry), Expected) for unit, entry in tomllib.loads(path.read_text()).items()}


def compare(root: Path, expected: Expected) -> list[Line]:
    """Choose the profile of the board below `root`, ask all probes that read files, and compare."""
    profile = load_for_board(root, expected.given or "auto")
    lines = [Line("profile", expected.profile, profile.id, profile.id == expected.profile)] if expected.profile else []
    found = run_probes(root, profile, PROBES, lambda: 1.0)
    return [*lines, *_readings(found, expected), *_words(found, expected)]


def _readings(found: ProbeResult, expected: Expected) -> Iterator[Line]:
    for name, value in expected.readings.items():
        got = found.readings.get(name)
        tolerance = OF_TOTAL if name == TOTAL else EXACT
        same = got is not None and math.isclose(got.value, value, rel_tol=tolerance, abs_tol=1e-9)
        yield Line(name, f"{value:.10g}", f"{got.value:.10g}" if got else _why(found, name), same)
    for name in expected.modelled:
        got = found.readings.get(name)
        yield Line(
            name, "modelled or absent", got.quality if got else "absent", got is None or got.quality == "modelled"
        )
    unasked = {name for name in found.readings if name.startswith("power.")} - {*expected.readings, *expected.modelled}
    for name in sorted(unasked | (found.readings.keys() | found.absent.keys()) & set(expected.none)):
        got = found.readings.get(name)
        yield Line(name, "nothing", f"{got.value:.10g}" if got else _why(found, name), same=False)


def _words(found: ProbeResult, expected: Expected) -> Iterator[Line]:
    for name, lack in expected.absent.items():
        got = found.absent[name].lack if name in found.absent else "a figure" if name in found.readings else "nothing"
        yield Line(name, lack, got, got == lack)
    for name, fact in expected.facts.items():
        yield Line(name, fact, found.facts.get(name, "nothing"), found.facts.get(name) == fact)


def _why(found: ProbeResult, name: str) -> str:
    lack = found.absent.get(name) or found.absent.get(name.partition(".")[0])
    return f"{lack.lack}: {lack.cause}" if lack else "nothing"


def _sorted(entry: dict[str, Any]) -> dict[str, Any]:
    """Gather the figures, which stand in the table by their names."""
    figures = {name: value for name, value in entry.items() if "." in name}
    return {name: value for name, value in entry.items() if "." not in name} | {"readings": figures}
