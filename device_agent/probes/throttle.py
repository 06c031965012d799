"""Throttling probe: throttled now or since boot, undervoltage, over-current."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import msgspec

from device_agent.hardware import firmware
from device_agent.hardware.files import find_paths, list_folder, read_text, read_text_or
from device_agent.hardware.hwmon import find_chips
from device_agent.probes.base import WHOLE_NUMBER, ProbeResult, describe_absence, read_within
from device_agent.probes.clocks import PLAUSIBLE_HERTZ, POLICY_FOLDER, find_policies
from device_agent.probes.thermal import ZONE_FOLDER
from device_agent.profile.schema import Profile, Throttle
from shared.errors import NoData
from shared.protocol.measurements import Absent, Quality, Reading

FIRMWARE = "firmware"
"""Raspberry Pi firmware; it throttles without telling Linux, so no other source can rule throttling out."""

FIRMWARE_COPIES = tuple(f"sys/devices/platform/{depth}*firmware*/get_throttled" for depth in ("", "*/", "*/*/"))
"""Kernel's copy of the firmware's bits; its path depends on the Raspberry Pi model.

It is updated only when somebody queries the firmware (raspberrypi/linux#2367: 0 while vcgencmd says 0x80008), and
raspberrypi-hwmon, which queries every 2 s, clears the sticky bits. A set bit is reliable; a clear bit means nothing.
"""
KERNEL_COPY, VOLTAGE_ALARM = "kernel copy", "rpi_volt alarm"

UNDERVOLTAGE, OVER_CURRENT, CAPPED, THROTTLED = "undervoltage", "over-current", "clock capped", "throttled"
TEMPERATURE_LIMIT, COOLS = "soft temperature limit", "cools by slowing down"
"""Causes in the fact `throttle`."""

BIT_MEANINGS = (UNDERVOLTAGE, CAPPED, THROTTLED, TEMPERATURE_LIMIT)
"""Meaning of bit n of the firmware's word for now, and of bit n + 16 since boot."""

NOW_FLAG, UNDERVOLTAGE_FLAG = "throttle.now_flag", "throttle.undervoltage_flag"
REPORT_FIELDS: Mapping[str, str] = {
    NOW_FLAG: "now",
    UNDERVOLTAGE_FLAG: "undervoltage",
    "throttle.since_boot_flag": "since_boot",
    "throttle.overcurrent_count": "overcurrent",
}
"""Field of `ThrottleReport` behind each reading."""

AUTHORITATIVE_SOURCES: Mapping[str, frozenset[str]] = {
    "now": frozenset({FIRMWARE, "ina3221_alarm", "cooling_device"}),
    "undervoltage": frozenset({FIRMWARE}),
    "since_boot": frozenset({FIRMWARE, "soctherm"}),
    "overcurrent": frozenset({"soctherm"}),
}
"""Sources that must answer, if the board has them, before a flag counts as false."""

SLOWING_DEVICES = re.compile(r"cpufreq|devfreq|processor|powerclamp|throttle", re.IGNORECASE)
"""Cooling devices that reduce speed; others are fans."""

COMPATIBLE_FILES = ("proc/device-tree/compatible", "sys/firmware/devicetree/base/compatible")
"""Device tree's `compatible` tokens; containers hide the second path."""

MAX_STATE, MAX_EVENTS = 10_000, 1e9
LARGEST_STEP_MHZ = 100.0
"""Assumed for drivers that list no clocks, such as intel_pstate."""
PLAUSIBLE_MHZ = (PLAUSIBLE_HERTZ[0] / 1e6, PLAUSIBLE_HERTZ[1] / 1e6)


class ThrottleReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of one source; a field is None if the source, or a part of it, cannot tell.

    Attributes:
        lack: Why the report is incomplete.
        origin: Actual origin of the report, if it is not the source itself.
    """

    now: bool | None = None
    undervoltage: bool | None = None
    since_boot: bool | None = None
    overcurrent: int | None = None
    messages: tuple[str, ...] = ()
    lack: Absent | None = None
    origin: str = ""


Source: TypeAlias = Callable[[Path, Throttle], ThrottleReport]


def read(root: Path, profile: Profile, at: float) -> ProbeResult:
    """Read `throttle.*` from the profile's sources, and a text for people as the fact `throttle`.

    A flag is 1 if any source says so, and 0 only if all authoritative sources of the board say so. A capped clock is
    weak evidence, since a power mode or an operator may have capped it: it counts only if no other source answers.

    Raises:
        NoData: The board has no source.
    """
    sources, answers = _sources(), dict[str, ThrottleReport]()
    lacking: dict[str, Absent] = {}
    for source in profile.throttle.sources:
        try:
            answers[source] = sources[source](root, profile.throttle)
        except NoData as error:
            lacking[source] = describe_absence(error)
    if all(absence.lack == "not_present" for absence in lacking.values()) and not answers:
        cause = "; ".join(lack.cause for lack in lacking.values()) or "the profile names no source"
        raise NoData(cause)
    refusals = lacking | {source: evidence.lack for source, evidence in answers.items() if evidence.lack}
    silent = {
        source: absence for source, absence in refusals.items() if absence.lack != "not_present" or source == FIRMWARE
    }
    readings: dict[str, Reading] = {}
    absent = {f"throttle.{source}": absence for source, absence in refusals.items() if absence.lack != "not_present"}
    for key, field in REPORT_FIELDS.items():
        values = _collect_answers(answers, field)
        doubts = [
            silent[name]
            for name in silent
            if name in AUTHORITATIVE_SOURCES[field] and getattr(answers.get(name), field, None) is None
        ]
        if any(values.values()) or (values and not doubts):
            readings[key] = _make_reading(values, answers, key, at)
        elif doubts:
            absent[key] = doubts[0]
    volts = readings.get(UNDERVOLTAGE_FLAG)
    if volts and not volts.value and not _has_detector(root, profile.throttle):
        del readings[UNDERVOLTAGE_FLAG]
        absent[UNDERVOLTAGE_FLAG] = Absent(lack="not_present", cause="this board has no undervoltage detector")
    messages = [message for evidence in answers.values() for message in evidence.messages]
    nothing = "unknown" if NOW_FLAG in absent else "none"
    return ProbeResult(
        readings=readings, absent=absent, facts={"throttle": ", ".join(dict.fromkeys(messages)) or nothing}
    )


def _has_detector(root: Path, throttle: Throttle) -> bool:
    """Check whether this board can sense undervoltage; compute modules may lack the detector of the same chip."""
    if not throttle.without_detector:
        return throttle.senses_undervoltage
    tokens = {token for path in COMPATIBLE_FILES for token in read_text_or(root / path).split("\0") if token}
    return throttle.senses_undervoltage and not tokens & set(throttle.without_detector)


def _make_reading(values: Mapping[str, int], answers: Mapping[str, ThrottleReport], key: str, at: float) -> Reading:
    source = max(values, key=lambda name: values[name])  # the first of the largest
    quality: Quality = "modelled" if source == "clock" else "measured"
    unit = key.rpartition("_")[2]
    origin = answers[source].origin or source
    return Reading(value=float(values[source]), unit=unit, source=origin, quality=quality, at=at)


def _collect_answers(answers: Mapping[str, ThrottleReport], field: str) -> dict[str, int]:
    """Return each source's value of a field; the clock counts only if no other source answers."""
    values = {
        source: int(value) for source, evidence in answers.items() if (value := getattr(evidence, field)) is not None
    }
    return {source: value for source, value in values.items() if source != "clock" or len(values) == 1}


def _read_firmware(root: Path, _: Throttle) -> ThrottleReport:
    """Read a Raspberry Pi's firmware; if it refuses, the set bits of the kernel's copy, and the voltage alarm."""
    try:
        return decode_bits(firmware.parse_throttled_bits(firmware.ask(root, "get_throttled")))
    except NoData as error:
        copy, low = _read_kernel_copy(root), _read_voltage_alarm(root)
        if not copy and low is None:
            raise
        bits = decode_bits(copy | int(low or 0))
        return ThrottleReport(
            now=bits.now or None,
            undervoltage=low if low is not None else bits.undervoltage or None,
            since_boot=bits.since_boot or None,
            messages=bits.messages,
            lack=describe_absence(error),
            origin=KERNEL_COPY if copy else VOLTAGE_ALARM,
        )


def _read_kernel_copy(root: Path) -> int:
    """Return the set bits of the kernel's copy; 0 if there is no readable copy."""
    for path in (path for pattern in FIRMWARE_COPIES for path in find_paths(root, pattern)):
        try:
            return firmware.parse_throttled_bits(f"throttled=0x{read_text(path)}")
        except NoData:
            continue
    return 0


def _read_voltage_alarm(root: Path) -> bool | None:
    """Read the undervoltage alarm of raspberrypi-hwmon, which queries the firmware every 2 s; None without it."""
    try:
        alarms, _ = _read_figures(_list_files(root, "rpi_volt", "in0_lcrit_alarm"), "voltage alarm")
    except NoData:
        return None
    return any(alarms.values())


def decode_bits(bits: int) -> ThrottleReport:
    """Decode the firmware's bits: 0 undervoltage, 1 to 3 limits of the clock; 16 to 19 since boot."""
    now = [meaning for bit, meaning in enumerate(BIT_MEANINGS) if bits >> bit & 1]
    since = [
        f"{meaning} since boot"
        for bit, meaning in enumerate(BIT_MEANINGS)
        if bits >> bit + 16 & 1 and meaning not in now
    ]
    return ThrottleReport(
        now=bool(bits & 0b1110),
        undervoltage=bool(bits & 1),
        since_boot=bool(bits & 0b1111_0000_0000_0000_1111),
        messages=(*now, *since),
    )


def _read_soctherm(root: Path, _: Throttle) -> ThrottleReport:
    """Read the counters of a Jetson's SoC: oc1 undervoltage, oc2 mean current, oc3 momentary current."""
    files = _list_files(root, "soctherm_oc", "oc[0-9]*_event_cnt")
    counts, lack = _read_figures(files, "over-current counter", most=MAX_EVENTS)
    undervoltage = sum(count for path, count in counts.items() if path.name.startswith("oc1_"))
    overcurrent = sum(counts.values()) - undervoltage
    events = {UNDERVOLTAGE: undervoltage, OVER_CURRENT: overcurrent}
    messages = tuple(f"{event} since boot" for event, count in events.items() if count > 0)
    return ThrottleReport(
        since_boot=bool(messages) or (None if lack else False),
        overcurrent=None if lack else overcurrent,
        messages=messages,
        lack=lack,
    )


def _read_ina3221_alarm(root: Path, _: Throttle) -> ThrottleReport:
    """Read the alarms of rails above their current limit, at which the board throttles."""
    files = _list_files(root, "ina3221", "curr[0-9]*_alarm")
    alarms, lack = _read_figures(files, "INA3221 alarm")
    rails = {_read_label(path) for path, state in alarms.items() if state}
    messages = tuple(f"{OVER_CURRENT} on {rail}" for rail in sorted(rails))
    return ThrottleReport(now=bool(rails) or (None if lack else False), messages=messages, lack=lack)


def _read_label(alarm: Path) -> str:
    channel = re.sub(r"\D*(\d+).*", r"\1", alarm.name)
    return read_text_or(alarm.with_name(f"in{channel}_label"), f"channel {channel}")


def _read_cooling_devices(root: Path, _: Throttle) -> ThrottleReport:
    """Read the kernel's thermal throttling from its cooling devices; a state of -1 means that the device is off."""
    states: dict[str, int] = {}
    refusal: NoData | None = None
    for device in list_folder(root / ZONE_FOLDER, "cooling_device*"):
        try:
            kind = read_text(device / "type")
            if not SLOWING_DEVICES.search(kind):
                continue
            state = int(read_within(device / "cur_state", (-1, MAX_STATE)))
        except NoData as error:
            if error.lack != "not_present":  # some have no state
                refusal = error
            continue
        if state >= 0:
            states[kind] = max(state, states.get(kind, 0))
    if not states:
        raise refusal or NoData(f"{root / ZONE_FOLDER}: no cooling device that reduces speed")
    hot = [kind for kind, state in states.items() if state]
    messages = tuple(f"{kind} {COOLS}" for kind in hot)
    lack = describe_absence(refusal) if refusal else None
    return ThrottleReport(now=bool(hot) or (None if lack else False), messages=messages, lack=lack)


def _read_clock_caps(root: Path, throttle: Throttle) -> ThrottleReport:
    """Compare the current clock limits with the hardware's, and with a cap set on purpose."""
    capped, has_limits = set[str](), False
    refusal: NoData | None = None
    for policy in find_policies(root):
        try:
            allowed, most = (
                read_within(policy / "scaling_max_freq", PLAUSIBLE_MHZ, 1e-3),
                read_within(policy / "cpuinfo_max_freq", PLAUSIBLE_MHZ, 1e-3),
            )
        except NoData as error:
            if error.lack != "not_present":
                refusal = error
            continue
        has_limits = True
        if allowed < min(most, _find_intended_mhz(policy, throttle.intended_max_hertz / 1e6)):
            capped.add(f"{CAPPED} at {allowed:.0f} of {most:.0f} MHz")
    if not has_limits:
        raise refusal or NoData(f"{root / POLICY_FOLDER}: no clock with limits")
    lack = describe_absence(refusal) if refusal else None
    return ThrottleReport(now=bool(capped) or (None if lack else False), messages=tuple(sorted(capped)), lack=lack)


def _find_intended_mhz(policy: Path, cap_mhz: float) -> float:
    """Return the lowest limit that the kernel may round an intended cap to; infinity without a cap.

    Kernels that list clocks take the next lower one; others round to steps of their own.
    """
    if not cap_mhz:
        return math.inf
    frequencies = read_text_or(policy / "scaling_available_frequencies").split()
    steps = [int(frequency) * 1e-3 for frequency in frequencies if WHOLE_NUMBER.fullmatch(frequency)]
    return max((step for step in steps if step <= cap_mhz), default=cap_mhz - LARGEST_STEP_MHZ)


def _list_files(root: Path, chip: str, pattern: str) -> list[Path]:
    return [path for folder in find_chips(root, (chip,)).require() for path in list_folder(folder, pattern)]


def _read_figures(paths: list[Path], what: str, most: float = 1) -> tuple[dict[Path, int], Absent | None]:
    """Return the values of the readable files, and the absence of the others; raises NoData if none is readable."""
    figures: dict[Path, int] = {}
    refusal: NoData | None = None
    for path in paths:
        try:
            figures[path] = int(read_within(path, (0, most)))
        except NoData as error:
            refusal = error
    if not figures:
        raise refusal or NoData(f"no {what}")
    return figures, describe_absence(refusal) if refusal else None


def _sources() -> Mapping[str, Source]:
    return {
        FIRMWARE: _read_firmware,
        "soctherm": _read_soctherm,
        "ina3221_alarm": _read_ina3221_alarm,
        "cooling_device": _read_cooling_devices,
        "clock": _read_clock_caps,
    }
