"""Throttling probe: whether the board is slowed down, was since boot, or lacks voltage, by all sources there are."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

import msgspec

from device_agent.hardware.files import read_text
from device_agent.probes import firmware
from device_agent.probes.base import ProbeResult, describe_absence, read_number
from device_agent.probes.clocks import POLICY_FOLDER, find_policies
from device_agent.probes.thermal import ZONE_FOLDER
from device_agent.profile.schema import Profile
from shared.errors import NoData
from shared.protocol.measurements import Absent, Quality, Reading

FIRMWARE_COPIES = tuple(f"sys/devices/platform/{depth}*firmware*/get_throttled" for depth in ("", "*/", "*/*/"))
"""A kernel's copy of the firmware's bits, seconds old; where it lies differs from one Raspberry Pi to the next."""

BIT_MEANINGS = ("undervoltage", "clock capped", "throttled", "soft temperature limit")
"""What bit n of the firmware's word says of now, and bit n + 16 of the time since the start."""

UNDERVOLTAGE_FLAG = "throttle.undervoltage_flag"
EVIDENCE_FIELDS: Mapping[str, str] = {
    "throttle.now_flag": "now",
    UNDERVOLTAGE_FLAG: "undervoltage",
    "throttle.since_boot_flag": "since_boot",
    "throttle.overcurrent_count": "overcurrent",
}
"""Readings, and what of an `Evidence` each of them tells."""

SLOWING_DEVICES = re.compile(r"cpufreq|devfreq|processor|powerclamp|throttle", re.IGNORECASE)
"""Cooling devices that take speed; others are fans."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of one source; None where it cannot tell.

    Attributes:
        now: The board is slowed down.
        undervoltage: Its supply is too weak, now.
        since_boot: One of both, since it started.
        overcurrent: Times that it drew too much, since it started.
        words: For people.
    """

    now: bool | None = None
    undervoltage: bool | None = None
    since_boot: bool | None = None
    overcurrent: int | None = None
    words: tuple[str, ...] = ()


Source: TypeAlias = Callable[[Path], Evidence]


def read(root: Path, profile: Profile, at: float) -> ProbeResult:
    """Read `throttle.*` of the profile's sources, and their words for people as the fact `throttle`.

    A flag is up when any source says so. A clock that is capped is evidence of the second rank, since a power mode or
    an operator may have capped it: it counts only where no other source answers.

    Args:
        root: The board's root folder.
        profile: Its firmware profile.
        at: Monotonic seconds of the readings.

    Raises:
        NoData: No source answers.
    """
    answers: dict[str, Evidence] = {}
    lacking: dict[str, Absent] = {}
    for source in profile.throttle.sources:
        try:
            answers[source] = SOURCES[source](root)
        except NoData as error:
            lacking[source] = describe_absence(error)
    if not answers:
        cause = "; ".join(lack.cause for lack in lacking.values()) or "the profile names no source"
        raise NoData(cause, lack=next((lack.lack for lack in lacking.values()), "not_present"))
    readings = {
        key: _make_reading(answers, key, at)
        for key in EVIDENCE_FIELDS
        if _collect_answers(answers, EVIDENCE_FIELDS[key])
    }
    lacking = {f"throttle.{source}": lack for source, lack in lacking.items() if lack.lack != "not_present"}
    if not profile.throttle.senses_undervoltage and UNDERVOLTAGE_FLAG in readings:
        del readings[UNDERVOLTAGE_FLAG]
        lacking[UNDERVOLTAGE_FLAG] = Absent(lack="not_present", cause="this board has no detector of it")
    words = [word for evidence in answers.values() for word in evidence.words]
    return ProbeResult(readings=readings, absent=lacking, facts={"throttle": ", ".join(dict.fromkeys(words)) or "none"})


def _make_reading(answers: Mapping[str, Evidence], key: str, at: float) -> Reading:
    known = _collect_answers(answers, EVIDENCE_FIELDS[key])
    source = max(known, key=lambda one: known[one])  # of several the first that says most
    quality: Quality = "modelled" if source == "clock" else "measured"
    unit = key.rpartition("_")[2]
    return Reading(value=float(known[source]), unit=unit, source=source, quality=quality, at=at)


def _collect_answers(answers: Mapping[str, Evidence], field: str) -> dict[str, int]:
    """Return each source's answer for one field; the clock counts only where no other source answers."""
    known = {source: int(value) for source, one in answers.items() if (value := getattr(one, field)) is not None}
    return {source: value for source, value in known.items() if source != "clock" or len(known) == 1}


def _read_firmware(root: Path) -> Evidence:
    """Read a Raspberry Pi's firmware, else the kernel's copy of its bits, else its voltage alarm alone."""
    try:
        return decode_bits(firmware.parse_throttled_bits(firmware.ask(root, "get_throttled")))
    except NoData as refused:
        for path in (path for pattern in FIRMWARE_COPIES for path in root.glob(pattern)):
            try:
                return decode_bits(int(read_text(path), 16))
            except (NoData, ValueError):
                continue
        for chip in _find_chips(root, "rpi_volt"):
            low = any(_read_figures(chip.glob("in0_lcrit_alarm"), "voltage alarm").values())
            return Evidence(undervoltage=low, words=BIT_MEANINGS[:1] * low)
        raise refused from None


def decode_bits(bits: int) -> Evidence:
    """Decode the firmware's bits: 0 undervoltage, 1 to 3 limits of the clock; 16 to 19 since boot."""
    now = [word for bit, word in enumerate(BIT_MEANINGS) if bits >> bit & 1]
    since = [f"{word} since boot" for bit, word in enumerate(BIT_MEANINGS) if bits >> bit + 16 & 1 and word not in now]
    return Evidence(
        now=bool(bits & 0b1110),
        undervoltage=bool(bits & 1),
        since_boot=bool(bits & 0b1111_0000_0000_0000_1111),
        words=(*now, *since),
    )


def _read_soctherm(root: Path) -> Evidence:
    """Read the counters of a Jetson's SoC: oc1 undervoltage, oc2 mean current, oc3 momentary current."""
    chips = _find_chips(root, "soctherm_oc")
    counts = _read_figures((path for chip in chips for path in chip.glob("oc*_event_cnt")), "counter of over-currents")
    undervoltage = sum(count for path, count in counts.items() if path.name.startswith("oc1_"))
    overcurrent = sum(counts.values()) - undervoltage
    words = ("undervoltage since boot",) * (undervoltage > 0) + ("over-current since boot",) * (overcurrent > 0)
    return Evidence(since_boot=bool(words), overcurrent=overcurrent, words=words)


def _read_ina3221_alarm(root: Path) -> Evidence:
    """Read whether a rail draws more than its limit, at which the board is slowed down."""
    chips = _find_chips(root, "ina3221")
    alarms = _read_figures((path for chip in chips for path in chip.glob("curr*_alarm")), "alarm of an INA3221")
    rails = {_read_label(path) for path, state in alarms.items() if state}
    return Evidence(now=bool(rails), words=tuple(f"over-current on {rail}" for rail in sorted(rails)))


def _read_label(alarm: Path) -> str:
    channel = re.sub(r"\D*(\d+).*", r"\1", alarm.name)
    try:
        return read_text(alarm.with_name(f"in{channel}_label"))
    except NoData:
        return f"channel {channel}"


def _read_cooling_devices(root: Path) -> Evidence:
    """Read whether the kernel takes speed for heat. A state of -1 is that of a device that is off."""
    states: dict[str, int] = {}
    for device in sorted((root / ZONE_FOLDER).glob("cooling_device*")):
        try:
            kind, state = read_text(device / "type"), int(read_number(device / "cur_state"))
        except NoData:
            continue  # some have no state
        if SLOWING_DEVICES.search(kind) and state >= 0:
            states[kind] = max(state, states.get(kind, 0))
    if not states:
        raise NoData(f"{root / ZONE_FOLDER}: no cooling device that takes speed")
    hot = [kind for kind, state in states.items() if state]
    return Evidence(now=bool(hot), words=tuple(f"{kind} cools by slowing down" for kind in hot))


def _read_clock_caps(root: Path) -> Evidence:
    """Read whether the highest clock allowed now is below the highest there is, whoever may have lowered it."""
    capped, seen = set[str](), False
    for policy in find_policies(root):
        try:
            allowed, most = (
                read_number(policy / "scaling_max_freq", 1e-3),
                read_number(policy / "cpuinfo_max_freq", 1e-3),
            )
        except NoData:
            continue
        seen = True
        if allowed < most:
            capped.add(f"clock capped at {allowed:.0f} of {most:.0f} MHz")
    if not seen:
        raise NoData(f"{root / POLICY_FOLDER}: no clock with limits")
    return Evidence(now=bool(capped), words=tuple(sorted(capped)))


def _find_chips(root: Path, name: str) -> list[Path]:
    return [path.parent for path in sorted(root.glob("sys/class/hwmon/hwmon*/name")) if _has_content(path, name)]


def _has_content(path: Path, name: str) -> bool:
    try:
        return read_text(path) == name
    except NoData:
        return False


def _read_figures(paths: Iterable[Path], what: str) -> dict[Path, int]:
    """Return the figures of the files that have one; raises NoData where none does."""
    figures: dict[Path, int] = {}
    refused = NoData(f"no {what}")
    for path in paths:
        try:
            figures[path] = int(read_number(path))
        except NoData as error:
            refused = error
    if not figures:
        raise refused
    return figures


SOURCES: Mapping[str, Source] = {
    "firmware": _read_firmware,
    "soctherm": _read_soctherm,
    "ina3221_alarm": _read_ina3221_alarm,
    "cooling_device": _read_cooling_devices,
    "clock": _read_clock_caps,
}
