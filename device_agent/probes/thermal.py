"""Temperature probe: thermal zones, CPU chips under hwmon, Raspberry Pi firmware."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from device_agent.hardware import firmware
from device_agent.hardware.files import list_folder, read_text
from device_agent.hardware.hwmon import find_chips
from device_agent.probes.base import ProbeResult, describe_absence, read_number
from device_agent.profile.schema import Profile
from shared.errors import NoData
from shared.protocol.measurements import Absent, Lack, Reading

ZONE_FOLDER = "sys/class/thermal"
HOTTEST_CELSIUS = "thermal.hottest_celsius"
MAX_SENSORS = 64
"""Most sensors in a report, hottest first; a server with thousands of zones made reports of 400 kB."""
CPU_CHIPS = ("coretemp", "cpu_thermal", "k10temp", "zenpower")
"""Drivers of CPU sensors under hwmon; many other chips are fans, disks and network cards."""

CONSTANT_ZONES = re.compile(r"pmic[-_]die", re.IGNORECASE)
"""Power chip of many Jetsons: its driver reports a constant 100 °C unless an alarm is raised."""

MAX_NAME_CHARS = 60
POWER_CHIPS = re.compile(r"pmic", re.IGNORECASE)
"""Power chips, many of which only report thresholds: they are reported, but never count as the hottest."""


class Sensor(NamedTuple):
    """Temperature sensor: zone type or chip name, source, and degrees Celsius or the error."""

    kind: str
    source: str
    celsius: float | NoData


def read(root: Path, profile: Profile, at: float) -> ProbeResult:
    """Read `thermal.<type>_celsius` of every sensor, and the maximum as `thermal.hottest_celsius`.

    Zones are named by type, since their numbers change at every boot; a repeated type gets a suffix, as in
    `x86_pkg_temp-2`. If a sensor is unreadable, the maximum is over the others, and its source says so.

    Raises:
        NoData: The board has no temperature sensor.
    """
    zones = list(_read_zones(root))
    zone_kinds = {zone.kind.replace("-", "_") for zone in zones}  # the kernel shows many zones as hwmon chips too
    sensors = zones + [chip for chip in _read_chips(root, profile) if chip.kind not in zone_kinds]
    ignored = profile.thermal.ignore
    sensors = [sensor for sensor in sensors if sensor.kind not in ignored and not CONSTANT_ZONES.fullmatch(sensor.kind)]
    accept = profile.thermal.accept_celsius
    sensors = [
        sensor._replace(celsius=_refuse_implausible(sensor.celsius, sensor.source, accept)) for sensor in sensors
    ]
    if "firmware" in profile.cpu.sources and not any(isinstance(sensor.celsius, float) for sensor in sensors):
        sensors.append(_ask_firmware(root))
    if not sensors:
        raise NoData(f"{root / ZONE_FOLDER}: no thermal zone, and no hwmon chip {', '.join(CPU_CHIPS)}")
    return _collect_readings(sensors, profile, at)


def _collect_readings(sensors: list[Sensor], profile: Profile, at: float) -> ProbeResult:
    readings: dict[str, Reading] = {}
    lacking: dict[str, Absent] = {}
    counts: Counter[str] = Counter()
    for kind, source, celsius in sensors:
        name = _choose_name(kind, counts)
        value = _refuse_implausible(celsius, source, profile.thermal.accept_celsius)
        if isinstance(value, NoData):
            lacking[name] = describe_absence(value)
        else:
            role = profile.thermal.zones.get(kind)
            place = f"{source} ({role})" if role else source
            readings[name] = Reading(value=value, unit="celsius", source=place, quality="measured", at=at)
    hot = [reading for name, reading in readings.items() if not POWER_CHIPS.search(name)]
    if hot:
        readings[HOTTEST_CELSIUS] = _choose_hottest(hot, len(lacking))
    else:
        lack: Lack = next((absence.lack for absence in lacking.values()), "not_present")
        lacking[HOTTEST_CELSIUS] = describe_absence(NoData("no usable sensor answers", lack=lack))
    return _keep_hottest(readings, lacking)


def _keep_hottest(readings: dict[str, Reading], lacking: dict[str, Absent]) -> ProbeResult:
    """Limit the report to the hottest sensors and as many unreadable ones, and state the number left out."""
    ranked = sorted(readings, key=lambda name: (name != HOTTEST_CELSIUS, -readings[name].value))
    names, absent = (
        set(ranked[: MAX_SENSORS + 1]),
        dict(sorted(lacking.items(), key=lambda item: item[0] != HOTTEST_CELSIUS)[:MAX_SENSORS]),
    )
    facts = {}
    if len(names) + len(absent) < len(readings) + len(lacking):
        count = len({*readings, *lacking} - {HOTTEST_CELSIUS})
        facts["thermal"] = (
            f"{count} sensors; reported: the {MAX_SENSORS} hottest and at most {MAX_SENSORS} unreadable ones"
        )
    hottest = {name: reading for name, reading in readings.items() if name in names}
    return ProbeResult(readings=hottest, absent=absent, facts=facts)


def _choose_hottest(readings: list[Reading], lacking: int) -> Reading:
    hottest = max(readings, key=lambda reading: reading.value)
    if not lacking:
        return hottest
    source = f"{hottest.source}; {lacking} of {len(readings) + lacking} thermometers do not answer"
    return replace(hottest, source=source)


def _choose_name(kind: str, counts: Counter[str]) -> str:
    """Return a unique reading name for a sensor type, and count it."""
    label = re.sub(r"[^\w.-]+", "-", kind[:MAX_NAME_CHARS]) or "unnamed"
    counts[label] += 1
    while counts[label] > 1:
        numbered = f"{label}-{counts[label]}"
        if not counts[numbered]:
            counts[numbered] += 1
            return f"thermal.{numbered}_celsius"
        counts[label] += 1
    return f"thermal.{label}_celsius"


def _refuse_implausible(celsius: float | NoData, source: str, accept: tuple[float, float]) -> float | NoData:
    if isinstance(celsius, NoData):
        return celsius
    if celsius == 0:
        return NoData(f"{source}: 0 celsius exactly: the sensor is off or dead", lack="invalid")
    if accept[0] <= celsius <= accept[1]:
        return celsius
    return NoData(f"{source}: {celsius:g} celsius is out of range ({accept[0]:g} to {accept[1]:g})", lack="invalid")


def _read_zones(root: Path) -> Iterator[Sensor]:
    for zone in list_folder(root / ZONE_FOLDER, "thermal_zone[0-9]*"):
        try:
            kind = read_text(zone / "type")
        except NoData as error:
            cause = f"the type of {zone.name} cannot be read: {error}"
            yield Sensor(zone.name, zone.name, NoData(cause, lack=error.lack))
            continue
        if kind:
            yield Sensor(kind, zone.name, _read_celsius(zone / "temp"))
        else:
            yield Sensor(zone.name, zone.name, NoData(f"{zone.name} has an empty type", lack="invalid"))


def _read_chips(root: Path, profile: Profile) -> Iterator[Sensor]:
    """Yield the hottest input of each chip, or an error if an input is unreadable.

    Dead inputs, of which a k10temp has many, are skipped.
    """
    try:
        chips = find_chips(root, CPU_CHIPS)
    except NoData as error:
        yield Sensor("hwmon", "hwmon", error)
        return
    for chip, name in chips.folders:
        yield Sensor(name, chip.name, _read_chip(chip, profile.thermal.accept_celsius))
    if chips.refusal:
        yield Sensor("hwmon", "hwmon", chips.refusal)  # an unidentified chip may be a temperature sensor


def _read_chip(chip: Path, accept: tuple[float, float]) -> float | NoData:
    try:
        inputs = [_read_celsius(path) for path in list_folder(chip, "temp*_input")]
    except NoData as error:
        return error
    if refusals := [value for value in inputs if isinstance(value, NoData)]:
        return refusals[0]
    checked = [_refuse_implausible(value, chip.name, accept) for value in inputs]
    dead = next((value for value in checked if isinstance(value, NoData)), NoData(f"{chip}: no temp*_input"))
    return max((value for value in checked if isinstance(value, float)), default=dead)


def _read_celsius(path: Path) -> float | NoData:
    try:
        return read_number(path) / 1000
    except NoData as error:
        return error


def _ask_firmware(root: Path) -> Sensor:
    try:
        return Sensor("firmware", "firmware", firmware.parse_celsius(firmware.ask(root, "measure_temp")))
    except NoData as error:
        return Sensor("firmware", "firmware", error)
