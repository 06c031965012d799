"""Throttling probe: whether the board is slowed down, was since boot, or lacks voltage, by all sources there are."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import msgspec

from device_agent.hardware import firmware
from device_agent.hardware.files import find_paths, list_folder, read_text
from device_agent.hardware.hwmon import find_chips
from device_agent.probes.base import WHOLE_NUMBER, ProbeResult, describe_absence, read_within
from device_agent.probes.clocks import PLAUSIBLE_HERTZ, POLICY_FOLDER, find_policies
from device_agent.probes.thermal import ZONE_FOLDER
from device_agent.profile.schema import Profile, Throttle
from shared.errors import NoData
from shared.protocol.measurements import Absent, Quality, Reading

FIRMWARE = "firmware"
"""A Raspberry Pi's: it slows the clock down behind Linux' back, so that without its word nobody knows."""

FIRMWARE_COPIES = tuple(f"sys/devices/platform/{depth}*firmware*/get_throttled" for depth in ("", "*/", "*/*/"))
"""A kernel's copy of the firmware's bits; where it lies differs from one Raspberry Pi to the next.

Nothing updates it but a question to the firmware (raspberrypi/linux#2367: 0 while vcgencmd says 0x80008), and
raspberrypi-hwmon asks every 2 s in a way that clears the sticky bits. A bit that is set was true; one that is not set
says nothing.
"""
KERNEL_COPY, VOLTAGE_ALARM = "kernel copy", "rpi_volt alarm"

BIT_MEANINGS = ("undervoltage", "clock capped", "throttled", "soft temperature limit")
"""What bit n of the firmware's word says of now, and bit n + 16 of the time since the start."""

NOW_FLAG, UNDERVOLTAGE_FLAG = "throttle.now_flag", "throttle.undervoltage_flag"
EVIDENCE_FIELDS: Mapping[str, str] = {
    NOW_FLAG: "now",
    UNDERVOLTAGE_FLAG: "undervoltage",
    "throttle.since_boot_flag": "since_boot",
    "throttle.overcurrent_count": "overcurrent",
}
"""Readings, and what of an `Evidence` each of them tells."""

TELLERS: Mapping[str, frozenset[str]] = {
    "now": frozenset({FIRMWARE, "ina3221_alarm", "cooling_device"}),
    "undervoltage": frozenset({FIRMWARE}),
    "since_boot": frozenset({FIRMWARE, "soctherm"}),
    "overcurrent": frozenset({"soctherm"}),
}
"""Sources without which, where the board has them, nobody knows that something is not so."""

SLOWING_DEVICES = re.compile(r"cpufreq|devfreq|processor|powerclamp|throttle", re.IGNORECASE)
"""Cooling devices that take speed; others are fans."""

COMPATIBLE_FILES = ("proc/device-tree/compatible", "sys/firmware/devicetree/base/compatible")
"""The board's tokens; containers hide the second."""

MAX_STATE, MAX_EVENTS = 10_000, 1e9
LARGEST_STEP_MHZ = 100.0
"""Of drivers that list no clocks, such as intel_pstate."""
PLAUSIBLE_MHZ = (PLAUSIBLE_HERTZ[0] / 1e6, PLAUSIBLE_HERTZ[1] / 1e6)


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of one source; None where it cannot tell, also where one of its parts does not answer.

    Attributes:
        now: The board is slowed down.
        undervoltage: Its supply is too weak, now.
        since_boot: One of both, since it started.
        overcurrent: Times that it drew too much, since it started.
        lack: Why it cannot tell all it should.
        origin: Where the answer is from, if that is not the source itself.
    """

    now: bool | None = None
    undervoltage: bool | None = None
    since_boot: bool | None = None
    overcurrent: int | None = None
    words: tuple[str, ...] = ()
    lack: Absent | None = None
    origin: str = ""


Source: TypeAlias = Callable[[Path, Throttle], Evidence]


def read(root: Path, profile: Profile, at: float) -> ProbeResult:
    """Read `throttle.*` of the profile's sources, and their words for people as the fact `throttle`.

    A flag is up when any source says so; it is down when all sources that the board has say so, and the firmware where
    it is one of them. A clock that is capped is evidence of the second rank, since a power mode or an operator may have
    capped it: it counts only where no other source answers.

    Args:
        root: The board's root folder.
        at: Monotonic seconds of the readings.

    Raises:
        NoData: The board has no source.
    """
    answers: dict[str, Evidence] = {}
    lacking: dict[str, Absent] = {}
    for source in profile.throttle.sources:
        try:
            answers[source] = SOURCES[source](root, profile.throttle)
        except NoData as error:
            lacking[source] = describe_absence(error)
    if all(one.lack == "not_present" for one in lacking.values()) and not answers:
        cause = "; ".join(lack.cause for lack in lacking.values()) or "the profile names no source"
        raise NoData(cause)
    refusals = lacking | {source: one.lack for source, one in answers.items() if one.lack}
    silent = {source: one for source, one in refusals.items() if one.lack != "not_present" or source == FIRMWARE}
    readings: dict[str, Reading] = {}
    absent = {f"throttle.{source}": one for source, one in refusals.items() if one.lack != "not_present"}
    for key, field in EVIDENCE_FIELDS.items():
        known = _collect_answers(answers, field)
        doubts = [
            silent[one] for one in silent if one in TELLERS[field] and getattr(answers.get(one), field, None) is None
        ]
        if any(known.values()) or (known and not doubts):
            readings[key] = _make_reading(known, answers, key, at)
        elif doubts:
            absent[key] = doubts[0]
    volts = readings.get(UNDERVOLTAGE_FLAG)
    if volts and not volts.value and not _has_detector(root, profile.throttle):
        del readings[UNDERVOLTAGE_FLAG]
        absent[UNDERVOLTAGE_FLAG] = Absent(lack="not_present", cause="this board has no detector of undervoltage")
    words = [word for evidence in answers.values() for word in evidence.words]
    nothing = "unknown" if NOW_FLAG in absent else "none"
    return ProbeResult(readings=readings, absent=absent, facts={"throttle": ", ".join(dict.fromkeys(words)) or nothing})


def _has_detector(root: Path, throttle: Throttle) -> bool:
    """Return whether this board can sense undervoltage; compute modules differ from the board of the same chip."""
    if not throttle.without_detector:
        return throttle.senses_undervoltage
    tokens = {token for path in COMPATIBLE_FILES for token in _split_tokens(root / path)}
    return throttle.senses_undervoltage and not tokens & set(throttle.without_detector)


def _split_tokens(path: Path) -> list[str]:
    try:
        return read_text(path).split("\0")
    except NoData:
        return []


def _make_reading(known: Mapping[str, int], answers: Mapping[str, Evidence], key: str, at: float) -> Reading:
    source = max(known, key=lambda one: known[one])  # of several the first that says most
    quality: Quality = "modelled" if source == "clock" else "measured"
    unit = key.rpartition("_")[2]
    origin = answers[source].origin or source
    return Reading(value=float(known[source]), unit=unit, source=origin, quality=quality, at=at)


def _collect_answers(answers: Mapping[str, Evidence], field: str) -> dict[str, int]:
    """Return each source's answer for one field; the clock counts only where no other source answers."""
    known = {source: int(value) for source, one in answers.items() if (value := getattr(one, field)) is not None}
    return {source: value for source, value in known.items() if source != "clock" or len(known) == 1}


def _read_firmware(root: Path, _: Throttle) -> Evidence:
    """Read a Raspberry Pi's firmware; where it refuses, the bits set in the kernel's copy, and the voltage alarm."""
    try:
        return decode_bits(firmware.parse_throttled_bits(firmware.ask(root, "get_throttled")))
    except NoData as refused:
        copy, low = _read_kernel_copy(root), _read_voltage_alarm(root)
        if not copy and low is None:
            raise
        bits = decode_bits(copy | int(low or 0))
        return Evidence(
            now=bits.now or None,
            undervoltage=low if low is not None else bits.undervoltage or None,
            since_boot=bits.since_boot or None,
            words=bits.words,
            lack=describe_absence(refused),
            origin=KERNEL_COPY if copy else VOLTAGE_ALARM,
        )


def _read_kernel_copy(root: Path) -> int:
    """Return the bits that are set in the kernel's copy; 0 where there is none that can be read."""
    for path in (path for pattern in FIRMWARE_COPIES for path in find_paths(root, pattern)):
        try:
            return firmware.parse_throttled_bits(f"throttled=0x{read_text(path)}")
        except NoData:
            continue
    return 0


def _read_voltage_alarm(root: Path) -> bool | None:
    """Return whether raspberrypi-hwmon, which asks the firmware every 2 s, sees undervoltage; None without it."""
    try:
        alarms, _ = _read_figures(_list_files(root, "rpi_volt", "in0_lcrit_alarm"), "voltage alarm")
    except NoData:
        return None
    return any(alarms.values())


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


def _read_soctherm(root: Path, _: Throttle) -> Evidence:
    """Read the counters of a Jetson's SoC: oc1 undervoltage, oc2 mean current, oc3 momentary current."""
    files = _list_files(root, "soctherm_oc", "oc[0-9]*_event_cnt")
    counts, lack = _read_figures(files, "counter of over-currents", most=MAX_EVENTS)
    undervoltage = sum(count for path, count in counts.items() if path.name.startswith("oc1_"))
    overcurrent = sum(counts.values()) - undervoltage
    words = ("undervoltage since boot",) * (undervoltage > 0) + ("over-current since boot",) * (overcurrent > 0)
    return Evidence(
        since_boot=bool(words) or (None if lack else False),
        overcurrent=None if lack else overcurrent,
        words=words,
        lack=lack,
    )


def _read_ina3221_alarm(root: Path, _: Throttle) -> Evidence:
    """Read whether a rail draws more than its limit, at which the board is slowed down."""
    files = _list_files(root, "ina3221", "curr[0-9]*_alarm")
    alarms, lack = _read_figures(files, "alarm of an INA3221")
    rails = {_read_label(path) for path, state in alarms.items() if state}
    words = tuple(f"over-current on {rail}" for rail in sorted(rails))
    return Evidence(now=bool(rails) or (None if lack else False), words=words, lack=lack)


def _read_label(alarm: Path) -> str:
    channel = re.sub(r"\D*(\d+).*", r"\1", alarm.name)
    try:
        return read_text(alarm.with_name(f"in{channel}_label"))
    except NoData:
        return f"channel {channel}"


def _read_cooling_devices(root: Path, _: Throttle) -> Evidence:
    """Read whether the kernel takes speed for heat. A state of -1 is that of a device that is off."""
    states: dict[str, int] = {}
    refused: NoData | None = None
    for device in list_folder(root / ZONE_FOLDER, "cooling_device*"):
        try:
            kind = read_text(device / "type")
            if not SLOWING_DEVICES.search(kind):
                continue
            state = int(read_within(device / "cur_state", (-1, MAX_STATE)))
        except NoData as error:
            if error.lack != "not_present":  # some have no state
                refused = error
            continue
        if state >= 0:
            states[kind] = max(state, states.get(kind, 0))
    if not states:
        raise refused or NoData(f"{root / ZONE_FOLDER}: no cooling device that takes speed")
    hot = [kind for kind, state in states.items() if state]
    words = tuple(f"{kind} cools by slowing down" for kind in hot)
    lack = describe_absence(refused) if refused else None
    return Evidence(now=bool(hot) or (None if lack else False), words=words, lack=lack)


def _read_clock_caps(root: Path, throttle: Throttle) -> Evidence:
    """Read whether the highest clock allowed now is below the highest there is, and below a cap set on purpose."""
    capped, seen = set[str](), False
    refused: NoData | None = None
    for policy in find_policies(root):
        try:
            allowed, most = (
                read_within(policy / "scaling_max_freq", PLAUSIBLE_MHZ, 1e-3),
                read_within(policy / "cpuinfo_max_freq", PLAUSIBLE_MHZ, 1e-3),
            )
        except NoData as error:
            if error.lack != "not_present":
                refused = error
            continue
        seen = True
        if allowed < min(most, _find_intended_mhz(policy, throttle.intended_max_hertz / 1e6)):
            capped.add(f"clock capped at {allowed:.0f} of {most:.0f} MHz")
    if not seen:
        raise refused or NoData(f"{root / POLICY_FOLDER}: no clock with limits")
    lack = describe_absence(refused) if refused else None
    return Evidence(now=bool(capped) or (None if lack else False), words=tuple(sorted(capped)), lack=lack)


def _find_intended_mhz(policy: Path, cap_mhz: float) -> float:
    """Return the least clock that the kernel makes of an intended cap, which it rounds; infinity where there is none.

    Kernels that list clocks take the next lower one of them, the others round to their own steps.
    """
    if not cap_mhz:
        return math.inf
    try:
        words = read_text(policy / "scaling_available_frequencies").split()
    except NoData:
        words = []
    steps = [int(word) * 1e-3 for word in words if WHOLE_NUMBER.fullmatch(word)]
    return max((step for step in steps if step <= cap_mhz), default=cap_mhz - LARGEST_STEP_MHZ)


def _list_files(root: Path, chip: str, pattern: str) -> list[Path]:
    return [path for folder in find_chips(root, (chip,)).require() for path in list_folder(folder, pattern)]


def _read_figures(paths: list[Path], what: str, most: float = 1) -> tuple[dict[Path, int], Absent | None]:
    """Return the figures of the files that have one, and why others have none; raises NoData where none has one."""
    figures: dict[Path, int] = {}
    refused: NoData | None = None
    for path in paths:
        try:
            figures[path] = int(read_within(path, (0, most)))
        except NoData as error:
            refused = error
    if not figures:
        raise refused or NoData(f"no {what}")
    return figures, describe_absence(refused) if refused else None


SOURCES: Mapping[str, Source] = {
    FIRMWARE: _read_firmware,
    "soctherm": _read_soctherm,
    "ina3221_alarm": _read_ina3221_alarm,
    "cooling_device": _read_cooling_devices,
    "clock": _read_clock_caps,
}
