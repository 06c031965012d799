"""Network probe: byte counters of each interface, and the speed of wired links."""

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
    """Check an interface name by the kernel's rule: 1 to 15 bytes, without blanks and `/`."""
    return 0 < len(name.encode(errors="replace")) <= MAX_NAME and name.isprintable() and not set(name) & set(" /")


def parse_dev(content: str) -> dict[str, tuple[int, int]]:
    """Parse /proc/net/dev into (bytes received, bytes sent) by interface, without loopback."""
    counters = {}
    for line in content.splitlines():
        name, colon, columns = line.rpartition(":")
        fields = columns.split()
        if not colon or name.strip() == LOOPBACK or len(fields) < COLUMNS or not is_interface(name.strip()):
            continue
        if all(field.isascii() and field.isdecimal() and len(field) <= MAX_DIGITS for field in fields[:COLUMNS]):
            counters[name.strip()] = int(fields[RECEIVED]), int(fields[SENT])
    return counters


def read(root: Path, profile: Profile, at: float) -> ProbeResult:
    """Read `net.<interface>_received_bytes`, `…_sent_bytes`, and `…_speed_bits_per_s` of a wired link that is up.

    If there are hardware interfaces, only those are read: bridges and tunnels would count the same bytes twice.
    """
    counters = parse_dev(read_text(root / SOURCE))
    hardware = {name for name in counters if path_exists(root / INTERFACES / name / "device")}
    chosen = {name: counts for name, counts in counters.items() if not hardware or name in hardware}
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
    """Read the speed of a wired link in bit/s; raises NoData for a radio (EINVAL) and for a link that is down (-1)."""
    try:
        mbits = read_number(interface / "speed")
    except NoData as error:
        lack = "not_present" if error.lack == "invalid" else error.lack
        raise NoData(str(error), lack=lack) from error
    if mbits <= 0 or mbits in UNKNOWN_MBITS:
        raise NoData(f"{interface}/speed: {mbits:g}: the link is down or its speed is unknown")
    if mbits > MAX_MBITS:
        raise NoData(f"{interface}/speed: {mbits:g} Mbit/s is above {MAX_MBITS:g}", lack="invalid")
    return mbits * BITS_PER_MBIT


def _make_reading(value: float, unit: str, source: str, at: float) -> Reading:
    return Reading(value=value, unit=unit, source=source, quality="measured", at=at)
