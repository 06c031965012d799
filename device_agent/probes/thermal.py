"""Temperature probe: thermal zones by type, hwmon chips of CPUs that are no zone, a Raspberry Pi's firmware last."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from device_agent.hardware.files import read_text
from device_agent.probes import firmware
from device_agent.probes.base import ProbeResult, describe_absence, read_number
from device_agent.profile.schema import Profile
from shared.errors import NoData
from shared.protocol.measurements import Absent, Reading

ZONE_FOLDER = "sys/class/thermal"
HOTTEST_CELSIUS = "thermal.hottest_celsius"
CPU_CHIPS = ("coretemp", "cpu_thermal", "k10temp", "zenpower")
"""Drivers of CPU sensors under hwmon; many other chips are fans, disks and network cards."""

Sensor: TypeAlias = tuple[str, str, float | NoData]
"""Type of a zone or name of a chip, where it was read, degrees Celsius or why there are none."""


def read(root: Path, profile: Profile, at: float) -> ProbeResult:
    """Read `thermal.<type>_celsius` of everything that has a temperature, and `thermal.hottest_celsius` of them all.

    Zones are told apart by type, since their numbers change with every boot; a type met again gets a number, as in
    `x86_pkg_temp-2`.

    Args:
        root: The board's root folder.
        profile: Its firmware profile.
        at: Monotonic seconds of the readings.

    Raises:
        NoData: The board has no thermometer.
    """
    zones = list(_read_zones(root))
    known = {kind.replace("-", "_") for kind, _, _ in zones}  # the kernel shows many a zone as a chip, too
    sensors = zones + [chip for chip in _read_chips(root) if chip[0] not in known]
    sensors = [sensor for sensor in sensors if sensor[0] not in profile.thermal.ignore]
    if "firmware" in profile.cpu.sources and not any(isinstance(value, float) for _, _, value in sensors):
        sensors.append(_ask_firmware(root))
    if not sensors:
        raise NoData(f"{root / ZONE_FOLDER}: no thermal zone, and no hwmon chip {', '.join(CPU_CHIPS)}")
    return _collect_readings(sensors, profile, at)


def _collect_readings(sensors: list[Sensor], profile: Profile, at: float) -> ProbeResult:
    readings: dict[str, Reading] = {}
    lacking: dict[str, Absent] = {}
    for kind, source, celsius in sensors:
        name = _choose_name(kind, readings.keys() | lacking.keys())
        value = _refuse_implausible(celsius, source, profile.thermal.accept_celsius)
        if isinstance(value, NoData):
            lacking[name] = describe_absence(value)
        else:
            role = profile.thermal.zones.get(kind)
            place = f"{source} ({role})" if role else source
            readings[name] = Reading(value=value, unit="celsius", source=place, quality="measured", at=at)
    if readings:
        readings[HOTTEST_CELSIUS] = max(readings.values(), key=lambda reading: reading.value)
    else:
        lacking[HOTTEST_CELSIUS] = describe_absence(
            NoData("no thermometer answers", lack=next(iter(lacking.values())).lack)
        )
    return ProbeResult(readings=readings, absent=lacking)


def _choose_name(kind: str, taken: set[str]) -> str:
    """Return the name of a type's reading; of one that is there already, with a number."""
    word = re.sub(r"[^\w.-]+", "-", kind) or "unnamed"
    names = [f"thermal.{word}_celsius", *(f"thermal.{word}-{count}_celsius" for count in range(2, len(taken) + 3))]
    return next(name for name in names if name not in taken)


def _refuse_implausible(celsius: float | NoData, source: str, accept: tuple[float, float]) -> float | NoData:
    if isinstance(celsius, NoData) or accept[0] <= celsius <= accept[1]:
        return celsius
    return NoData(f"{source}: {celsius:g} celsius is none that a board has", lack="invalid")


def _read_zones(root: Path) -> Iterator[Sensor]:
    folders = (root / ZONE_FOLDER).glob("thermal_zone*")
    for zone in sorted(folders, key=lambda folder: (len(folder.name), folder.name)):
        try:
            kind = read_text(zone / "type")
        except NoData:
            kind = zone.name
        yield kind, zone.name, _read_celsius(zone / "temp")


def _read_chips(root: Path) -> Iterator[Sensor]:
    """Yield one temperature a chip: that of its hottest input."""
    for chip in sorted((root / "sys/class/hwmon").glob("hwmon*")):
        try:
            name = read_text(chip / "name")
        except NoData:
            continue  # nobody knows what it is
        if name not in CPU_CHIPS:
            continue
        inputs = [_read_celsius(path) for path in sorted(chip.glob("temp*_input"))]
        values = [value for value in inputs if isinstance(value, float)]
        yield name, chip.name, max(values, default=next(iter(inputs), NoData(f"{chip}: no temp*_input")))


def _read_celsius(path: Path) -> float | NoData:
    try:
        return read_number(path) / 1000
    except NoData as error:
        return error


def _ask_firmware(root: Path) -> Sensor:
    try:
        return "firmware", "firmware", firmware.parse_celsius(firmware.ask(root, "measure_temp"))
    except NoData as error:
        return "firmware", "firmware", error
