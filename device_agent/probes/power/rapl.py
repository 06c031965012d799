"""RAPL energy counters of x86 packages, memory and, on some machines, the whole system.

Kernel: admin-guide/pm/powercap. Counters wrap; since CVE-2020-8694 only root may read them by default.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from device_agent.hardware.files import list_folder, path_exists, read_text
from device_agent.probes.base import ProbeResult, describe_absence, read_number, read_within
from device_agent.probes.power.rails import correct_watts, validate_watts
from device_agent.profile.schema import Power
from shared.errors import NoData
from shared.protocol.measurements import Absent, Provenance, Quality, Reading
from shared.runtime.clock import Clock

POWERCAP_FOLDER = "sys/class/powercap"
CONTROL_TYPES = ("intel-rapl", "intel-rapl-mmio")
"""The second repeats packages of the first and is only a fallback."""

REMEDY = (
    "to let the agent's user read it: make a group `powercap` with that user in it, and a file in /etc/tmpfiles.d with "
    "`z /sys/class/powercap/intel-rapl*:*/energy_uj 0440 root powercap`"
)
HIDDEN = (
    "RAPL is hidden by the container's runtime, which masks /sys/devices/virtual/powercap: mount that folder into the "
    "container read-only, or run the agent outside of it"
)
MICRO = 1e-6
RANGE_JOULES = (1.0, 1e15)
SHORTEST_S = 0.05
"""Counters tick once a millisecond, so shorter intervals are inaccurate."""
MAX_OVER_LIMIT = 3.0
"""A counter reset by suspend looks like a wrap; it is detected by watts above this multiple of the short-term limit."""

Part = Literal["machine", "package", "memory", "inside"]
"""Memory is outside its package's counter; other subzones of a package are inside."""


class Zone(msgspec.Struct, frozen=True, kw_only=True):
    """Counter that wraps at `range_joules`; `limit_w` is infinite if unknown."""

    folder: Path
    part: Part
    range_joules: float
    limit_w: float


def find_zones(root: Path) -> dict[str, Zone]:
    """Find zones by name, with the package's name as prefix of its subzones; raises NoData if there is none."""
    _refuse_hidden(root)
    for control in CONTROL_TYPES:
        zones: dict[str, Zone] = {}
        for key in _find_ids(root / POWERCAP_FOLDER, control):
            folder = root / POWERCAP_FOLDER / f"{control}:{key}"
            name, top = read_text(folder / "name"), key.partition(":")[0]
            label = name if top == key else f"{read_text(folder.with_name(f'{control}:{top}') / 'name')}-{name}"
            zones[f"{label}-{key}" if label in zones else label] = Zone(
                folder=folder,
                part=_classify(name, is_top=top == key),
                range_joules=read_within(folder / "max_energy_range_uj", RANGE_JOULES, MICRO),
                limit_w=_read_limit(folder),
            )
        if zones:
            return zones
    raise NoData(f"no RAPL zone below {root / POWERCAP_FOLDER}")


def _refuse_hidden(root: Path) -> None:
    """Raise NoData if a container runtime hides the counters behind dangling links."""
    for link in list_folder(root / POWERCAP_FOLDER, "intel-rapl*"):
        try:
            list_folder(link)
            hidden = link.is_symlink() and not path_exists(link)
        except NoData as error:
            raise NoData(f"{error}: {HIDDEN}", lack="denied") from error
        if hidden:
            raise NoData(f"{link} is a dangling link: {HIDDEN}", lack="denied")


def _find_ids(folder: Path, control: str) -> list[str]:
    """Return zone ids such as `a` and `a:0` (hexadecimal), parents first."""
    keys = [path.name.removeprefix(f"{control}:") for path in list_folder(folder, f"{control}:*")]
    return sorted((key for key in keys if re.fullmatch(r"[0-9a-f]+(:[0-9a-f]+)?", key)), key=lambda key: key.split(":"))


def _classify(name: str, *, is_top: bool) -> Part:
    """Classify a zone by name; raises NoData for an unknown top-level zone, since the total would be incomplete."""
    if is_top:
        if name == "psys":
            return "machine"
        if name.startswith("package"):
            return "package"
        raise NoData(f"RAPL: {name[:40]!r} is not a known top-level zone", lack="invalid")
    return "memory" if name == "dram" else "inside"


def _read_limit(zone: Path) -> float:
    try:
        return read_number(zone / "constraint_1_power_limit_uw", MICRO) * MAX_OVER_LIMIT or float("inf")
    except NoData:
        return float("inf")


def read_joules(zone: Zone) -> float:
    """Read a zone's counter; raises NoData, with a remedy if access is denied."""
    try:
        return read_within(zone.folder / "energy_uj", (0, zone.range_joules), MICRO)
    except NoData as error:
        remedy = f"; {REMEDY}" if error.lack == "denied" else ""
        raise NoData(f"{error}{remedy}", lack=error.lack) from error


def subtract_joules(before: float, after: float, zone: Zone, seconds: float) -> float:
    """Return the joules between two readings of a counter that may have wrapped once.

    Raises:
        NoData: The power is implausible: the counter was reset.
    """
    joules = after - before if after >= before else zone.range_joules - before + after
    if joules < 0 or joules > zone.limit_w * seconds:
        raise NoData(f"{joules:g} J in {seconds:g} s is implausible: the counter was reset", lack="invalid")
    return joules


def choose_total(watts: Mapping[str, float], zones: Mapping[str, Zone], *, machine: bool) -> tuple[str, ...]:
    """Choose the zones that make the total: the machine's counter, else packages and memory.

    A machine's counter that shows less than its packages is wrong, and ignored.

    Args:
        machine: True if a counter of the whole machine may be chosen.
    """
    packages = sum(watts.get(name, 0.0) for name, zone in zones.items() if zone.part == "package")
    for name, zone in zones.items():
        if machine and zone.part == "machine" and watts.get(name, 0.0) >= packages:
            return (name,)
    return tuple(name for name, zone in zones.items() if zone.part in ("package", "memory"))


def read_once(root: Path, at: float, scope: str) -> ProbeResult:
    """Read `power.<zone>_joules` (since the last wrap) of every zone; the total needs two reads and is absent.

    Args:
        scope: `power.scope` of the profile's total.

    Raises:
        NoData: There is no zone, or none is readable.
    """
    zones = find_zones(root)
    readings: dict[str, Reading] = {}
    missing: dict[str, Absent] = {}
    for name, zone in zones.items():
        try:
            value = read_joules(zone)
        except NoData as error:
            missing[f"power.{name}_joules"] = describe_absence(error)
            refusal = error
        else:
            readings[f"power.{name}_joules"] = Reading(
                value=value, unit="joules", source=f"rapl {name}", quality="measured", at=at
            )
    if not readings:
        raise refusal
    missing["power.total_watts"] = Absent(lack="busy", cause="counters need two reads")
    machine = any(zone.part == "machine" for zone in zones.values())
    return ProbeResult(readings=readings, absent=missing, facts={"power.scope": "machine" if machine else scope})


class RaplSource:
    """Power source of the mean watts between two reads; see `PowerSource`."""

    kind: Literal["instant", "mean"] = "mean"

    def __init__(self, root: Path, power: Power, clock: Clock, *, period_s: float) -> None:
        """Find the zones; raises NoData if there are none, or they are unreadable."""
        self._power, self._clock, self.period_s = power, clock, period_s
        self.uncertainty_w = power.uncertainty_w
        self._zones = {name: zone for name, zone in find_zones(root).items() if zone.part != "inside"}
        self._machine = True
        self._before: tuple[float, dict[str, float]] | None = None
        start = clock()
        self._read_counters()
        self.cost_s = clock() - start
        self._choose({})

    def read(self) -> Reading:
        at, counters = self._clock(), self._read_counters()
        if self._before is None:
            self._before = at, counters
            raise NoData("counters need a second read", lack="busy")
        since, before = self._before
        seconds = at - since
        if seconds < SHORTEST_S:
            raise NoData(f"{seconds:g} s between reads is too short for energy counters", lack="busy")
        self._before = at, counters
        self._refuse_wraps(seconds)
        watts = {
            name: subtract_joules(before[name], counters[name], zone, seconds) / seconds
            for name, zone in self._zones.items()
        }
        self._choose(watts)
        total = validate_watts(
            correct_watts(sum(watts[name] for name in self._names), self._power), self._power.valid_w
        )
        return Reading(
            value=total,
            unit="watts",
            source=self.provenance.source,
            quality=self.provenance.quality,
            at=at,
            uncertainty=math.hypot(total * self._power.uncertainty, self.uncertainty_w),
        )

    def _read_counters(self) -> dict[str, float]:
        return {name: read_joules(zone) for name, zone in self._zones.items()}

    def _refuse_wraps(self, seconds: float) -> None:
        """Raise NoData if a counter may have wrapped more than once."""
        for name, zone in self._zones.items():
            if seconds * min(zone.limit_w, self._power.valid_w[1]) >= zone.range_joules:
                raise NoData(f"{name}: may have wrapped twice in {seconds:g} s since the last read", lack="invalid")

    def _choose(self, watts: Mapping[str, float]) -> None:
        """Choose the zones of the total; a machine's counter that was wrong once is never used again."""
        self._names = choose_total(watts, self._zones, machine=self._machine)
        if not self._names:
            raise NoData("RAPL: no package zone", lack="invalid")
        self._machine = self._zones[self._names[0]].part == "machine"
        quality: Quality = "corrected" if (self._power.gain, self._power.offset_w) != (1, 0) else "measured"
        source = f"rapl {'+'.join(self._names)}"
        self.provenance = Provenance(source=source, quality=quality, uncertainty=self._power.uncertainty)
