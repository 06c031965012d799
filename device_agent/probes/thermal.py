"""Temperature probe: thermal zones by type, hwmon chips of CPUs that are no zone, a Raspberry Pi's firmware last."""

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
MOST_TOLD = 64
"""Thermometers that are told, the hottest; servers with thousands of zones made reports of 400 kB."""
CPU_CHIPS = ("coretemp", "cpu_thermal", "k10temp", "zenpower")
"""Drivers of CPU sensors under hwmon; many other chips are fans, disks and network cards."""

CONSTANT_ZONES = re.compile(r"pmic[-_]die", re.IGNORECASE)
"""The power chip of many Jetsons: its driver says 100 celsius as long as no alarm is raised, whatever the board."""

MAX_WORD = 60
POWER_CHIPS = re.compile(r"pmic", re.IGNORECASE)
"""Zones of power chips, of which many know thresholds only; they are told, and are not the hottest of a board."""


class Sensor(NamedTuple):
    """A thermometer: type of a zone or name of a chip, where it was read, degrees Celsius or why there are none."""

    kind: str
    source: str
    celsius: float | NoData


def read(root: Path, profile: Profile, at: float) -> ProbeResult:
    """Read `thermal.<type>_celsius` of everything that has a temperature, and `thermal.hottest_celsius` of them all.

    Zones are told apart by type, since their numbers change with every boot; a type met again gets a number, as in
    `x86_pkg_temp-2`. A zone whose type nobody can read says nothing. Where a thermometer does not answer, the hottest
    is that of the others, and its source says so.

    Args:
        root: The board's root folder.
        at: Monotonic seconds of the readings.

    Raises:
        NoData: The board has no thermometer.
    """
    zones = list(_read_zones(root))
    known = {zone.kind.replace("-", "_") for zone in zones}  # the kernel shows many a zone as a chip, too
    sensors = zones + [chip for chip in _read_chips(root, profile) if chip.kind not in known]
    ignored = profile.thermal.ignore
    sensors = [one for one in sensors if one.kind not in ignored and not CONSTANT_ZONES.fullmatch(one.kind)]
    accept = profile.thermal.accept_celsius
    sensors = [one._replace(celsius=_refuse_implausible(one.celsius, one.source, accept)) for one in sensors]
    if "firmware" in profile.cpu.sources and not any(isinstance(one.celsius, float) for one in sensors):
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
    hot = [one for name, one in readings.items() if not POWER_CHIPS.search(name)]
    if hot:
        readings[HOTTEST_CELSIUS] = _choose_hottest(hot, len(lacking))
    else:
        lack: Lack = next((one.lack for one in lacking.values()), "not_present")
        lacking[HOTTEST_CELSIUS] = describe_absence(NoData("no thermometer of known place answers", lack=lack))
    return _keep_hottest(readings, lacking)


def _keep_hottest(readings: dict[str, Reading], lacking: dict[str, Absent]) -> ProbeResult:
    """Leave out the coolest thermometers, and the last of those that do not answer, beyond a bound; say so."""
    ranked = sorted(readings, key=lambda name: (name != HOTTEST_CELSIUS, -readings[name].value))
    told, absent = set(ranked[: MOST_TOLD + 1]), dict(sorted(lacking.items(), key=_is_hottest)[:MOST_TOLD])
    facts = {}
    if len(told) + len(absent) < len(readings) + len(lacking):
        count = len({*readings, *lacking} - {HOTTEST_CELSIUS})
        facts["thermal"] = f"{count} thermometers, of which at most {MOST_TOLD} that answer and as many others are told"
    kept = {name: one for name, one in readings.items() if name in told}
    return ProbeResult(readings=kept, absent=absent, facts=facts)


def _is_hottest(entry: tuple[str, Absent]) -> bool:
    return entry[0] != HOTTEST_CELSIUS


def _choose_hottest(readings: list[Reading], lacking: int) -> Reading:
    hottest = max(readings, key=lambda reading: reading.value)
    if not lacking:
        return hottest
    source = f"{hottest.source}; {lacking} of {len(readings) + lacking} thermometers do not answer"
    return replace(hottest, source=source)


def _choose_name(kind: str, counts: Counter[str]) -> str:
    """Return the name of a type's reading, and count it; of a type that is there already, with a number."""
    word = re.sub(r"[^\w.-]+", "-", kind[:MAX_WORD]) or "unnamed"
    counts[word] += 1
    while counts[word] > 1:
        numbered = f"{word}-{counts[word]}"
        if not counts[numbered]:
            counts[numbered] += 1
            return f"thermal.{numbered}_celsius"
        counts[word] += 1
    return f"thermal.{word}_celsius"


def _refuse_implausible(celsius: float | NoData, source: str, accept: tuple[float, float]) -> float | NoData:
    if isinstance(celsius, NoData):
        return celsius
    if celsius == 0:
        return NoData(f"{source}: exactly 0 celsius is what a sensor that is off or dead reads", lack="invalid")
    if accept[0] <= celsius <= accept[1]:
        return celsius
    return NoData(f"{source}: {celsius:g} celsius is none that a board has", lack="invalid")


def _read_zones(root: Path) -> Iterator[Sensor]:
    for zone in list_folder(root / ZONE_FOLDER, "thermal_zone[0-9]*"):
        try:
            kind = read_text(zone / "type")
        except NoData as error:
            cause = f"{zone.name} is of a type that nobody can read: {error}"
            yield Sensor(zone.name, zone.name, NoData(cause, lack=error.lack))
            continue
        if kind:
            yield Sensor(kind, zone.name, _read_celsius(zone / "temp"))
        else:
            yield Sensor(zone.name, zone.name, NoData(f"{zone.name} has an empty type", lack="invalid"))


def _read_chips(root: Path, profile: Profile) -> Iterator[Sensor]:
    """Yield one temperature a chip: that of its hottest input, and none where one of them does not answer.

    An input that is dead, as many of a k10temp are, is passed over.
    """
    try:
        chips = find_chips(root, CPU_CHIPS)
    except NoData as error:
        yield Sensor("hwmon", "hwmon", error)
        return
    for chip, name in chips.folders:
        yield Sensor(name, chip.name, _read_chip(chip, profile.thermal.accept_celsius))
    if chips.refusal:
        yield Sensor("hwmon", "hwmon", chips.refusal)  # one that does not say what it is may be a thermometer


def _read_chip(chip: Path, accept: tuple[float, float]) -> float | NoData:
    try:
        inputs = [_read_celsius(path) for path in list_folder(chip, "temp*_input")]
    except NoData as error:
        return error
    if refusals := [one for one in inputs if isinstance(one, NoData)]:
        return refusals[0]
    judged = [_refuse_implausible(one, chip.name, accept) for one in inputs]
    dead = next((one for one in judged if isinstance(one, NoData)), NoData(f"{chip}: no temp*_input"))
    return max((one for one in judged if isinstance(one, float)), default=dead)


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
