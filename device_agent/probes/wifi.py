"""The radio's own rate and signal. The rate is that of its last frame: a bound of goodput, and seldom near it."""

from __future__ import annotations

import re
from pathlib import Path

from device_agent.hardware.files import text
from device_agent.hardware.tools import output
from device_agent.probes.base import Found, absent
from device_agent.profile.schema import Profile
from shared.errors import NoData
from shared.protocol.measurements import Absent, Quality, Reading

NET = "sys/class/net"
SIGNAL_DBM = (-120.0, 0.0)
"""Some drivers count signal on a scale of their own, upwards from 0."""


def read(root: Path, profile: Profile, at: float) -> Found:
    """Return `wifi.<if>_phy_bits_per_s`, `wifi.<if>_signal_dbm`, and what the driver expects to carry, if it does.

    The rate of the physical layer is measured, by the radio, and is what its name says; what a transfer reaches is
    `link.*`. An interface that sends nothing keeps its lowest rates, so that it may be far below, too. What the driver
    expects (`wifi.<if>_expected_bits_per_s`) is modelled.

    Raises:
        NoData: The board has no radio.
    """
    radios = [
        folder.name
        for folder in sorted((root / NET).glob("*"))
        if (folder / "wireless").exists() or (folder / "phy80211").exists()
    ]
    if not radios:
        raise NoData(f"{root / NET}: no wireless interface")
    found = [_radio(root, name, at) for name in radios]
    return Found(
        readings={key: value for one in found for key, value in one.readings.items()},
        absent={key: value for one in found for key, value in one.absent.items()},
    )


def _radio(root: Path, name: str, at: float) -> Found:
    lacking: dict[str, Absent] = {}
    try:
        said = linked(output(root, "iw", "dev", name, "link"), name)
    except NoData as error:
        lacking[f"wifi.{name}_phy_bits_per_s"] = absent(error)
        said = ""
    else:
        said += "\n" + _station(root, name)
    figures: list[tuple[str, float | None, Quality]] = [
        ("phy_bits_per_s", bits_per_s(r"tx bitrate:\s*([\d.]+) MBit/s", said), "measured"),
        ("expected_bits_per_s", bits_per_s(r"expected throughput:\s*([\d.]+)Mbps", said), "modelled"),
    ]
    readings = {
        f"wifi.{name}_{key}": Reading(value=value, unit="bits_per_s", source="iw", quality=quality, at=at)
        for key, value, quality in figures
        if value is not None
    }
    if said and f"wifi.{name}_phy_bits_per_s" not in readings:
        lacking[f"wifi.{name}_phy_bits_per_s"] = Absent(lack="not_present", cause=f"the driver of {name} tells no rate")
    try:
        readings[f"wifi.{name}_signal_dbm"] = _signal(root, name, said, at)
    except NoData as error:
        lacking[f"wifi.{name}_signal_dbm"] = absent(error)
    return Found(readings=readings, absent=lacking)


def linked(answer: str, name: str) -> str:
    """Return what `iw dev <if> link` says of a connection; raises NoData without one, which is no error to iw."""
    if answer.strip().startswith("Not connected"):
        raise NoData(f"{name} is not connected")
    return answer


def bits_per_s(pattern: str, said: str) -> float | None:
    """Return the first rate in a text, given there in megabits a second; None without one."""
    found = re.search(pattern, said, re.ASCII)
    try:
        return float(found[1]) * 1e6 if found else None
    except ValueError:
        return None


def _station(root: Path, name: str) -> str:
    """Return what the driver knows of the access point; some know nothing."""
    try:
        return output(root, "iw", "dev", name, "station", "dump")
    except NoData:
        return ""


def _signal(root: Path, name: str, said: str, at: float) -> Reading:
    """Return the signal from iw, else from the table that older kernels keep. Raises NoData."""
    found, source = re.search(r"signal:\s*(-?\d+)(?: \[[^\]]*\])? dBm", said, re.ASCII), "iw"
    if found is None:
        table, source = text(root / "proc/net/wireless"), "/proc/net/wireless"
        found = re.search(rf"^\s*{re.escape(name)}:\s*\S+\s+\S+\s+(-?\d+)", table, re.ASCII | re.MULTILINE)
    if found is None:
        raise NoData(f"nothing tells the signal of {name}")
    if not SIGNAL_DBM[0] <= float(found[1]) < SIGNAL_DBM[1]:
        raise NoData(f"{source}: {found[1]} is no signal in dBm", lack="invalid")
    return Reading(value=float(found[1]), unit="dbm", source=source, quality="measured", at=at)
