"""Network probe: bytes each interface has carried since boot, and the rate of wired links."""

from __future__ import annotations

from pathlib import Path

from device_agent.hardware.files import path_exists, read_text
from device_agent.probes.base import ProbeResult, describe_absence, read_number
from device_agent.profile.schema import Profile
from shared.errors import NoData
from shared.protocol.measurements import Absent, Reading

SOURCE = "proc/net/dev"
INTERFACES = "sys/class/net"
LOOPBACK = "lo"
COLUMNS, RECEIVED, SENT = 16, 0, 8
BITS_PER_MBIT = 1e6
UNKNOWN_MBITS = (0xFFFF, 0xFFFFFFFF)
MAX_MBITS = 1e6
MAX_DIGITS, MAX_NAME = 20, 15


def is_interface(name: str) -> bool:
    """Return whether an interface may be called so: the kernel takes 15 characters, without blanks and `/`."""
    return 0 < len(name.encode(errors="replace")) <= MAX_NAME and name.isprintable() and not set(name) & set(" /")


def parse_dev(content: str) -> dict[str, tuple[int, int]]:
    """Parse bytes received and sent by interface out of /proc/net/dev; loopback carries nothing anywhere."""
    counters = {}
    for line in content.splitlines():
        name, colon, columns = line.rpartition(":")
        words = columns.split()
        if not colon or name.strip() == LOOPBACK or len(words) < COLUMNS or not is_interface(name.strip()):
            continue
        if all(word.isascii() and word.isdecimal() and len(word) <= MAX_DIGITS for word in words[:COLUMNS]):
            counters[name.strip()] = int(words[RECEIVED]), int(words[SENT])
    return counters


def read(root: Path, profile: Profile, at: float) -> ProbeResult:
    """Read `net.<interface>_received_bytes`, `…_sent_bytes`, and `…_speed_bits_per_s` of a wired link that is up.

    Where there are interfaces of hardware, only those: bridges and tunnels carry the same bytes once more.

    Args:
        root: The board's root folder.
        at: Monotonic seconds of the readings.
    """
    counters = parse_dev(read_text(root / SOURCE))
    hardware = {name for name in counters if path_exists(root / INTERFACES / name / "device")}
    chosen = {name: both for name, both in counters.items() if not hardware or name in hardware}
    if not chosen:
        raise NoData(f"{root / SOURCE}: no interface but loopback")
    readings: dict[str, Reading] = {}
    missing: dict[str, Absent] = {}
    for name, (received, sent) in chosen.items():
        readings[f"net.{name}_received_bytes"] = _make_reading(received, "bytes", SOURCE, at)
        readings[f"net.{name}_sent_bytes"] = _make_reading(sent, "bytes", SOURCE, at)
        try:
            speed = read_speed(root / INTERFACES / name)
            readings[f"net.{name}_speed_bits_per_s"] = _make_reading(
                speed, "bits_per_s", f"{INTERFACES}/{name}/speed", at
            )
        except NoData as error:
            missing[f"net.{name}_speed_bits_per_s"] = describe_absence(error)
    return ProbeResult(readings=readings, absent=missing)


def read_speed(interface: Path) -> float:
    """Read the rate of a wired link, in bits a second; raises NoData for a radio (EINVAL), and when it is down (-1)."""
    try:
        mbits = read_number(interface / "speed")
    except NoData as error:
        lack = "not_present" if error.lack == "invalid" else error.lack
        raise NoData(str(error), lack=lack) from error
    if mbits <= 0 or mbits in UNKNOWN_MBITS:
        raise NoData(f"{interface}/speed: {mbits:g}: the link is down or knows no rate")
    if mbits > MAX_MBITS:
        raise NoData(f"{interface}/speed: {mbits:g} Mbit/s is nothing that a wire carries", lack="invalid")
    return mbits * BITS_PER_MBIT


def _make_reading(value: float, unit: str, source: str, at: float) -> Reading:
    return Reading(value=value, unit=unit, source=source, quality="measured", at=at)
