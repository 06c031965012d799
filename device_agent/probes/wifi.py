"""Wi-Fi probe: PHY rate and signal. The rate is that of the radio's last frame: a bound of goodput, seldom near it."""

from __future__ import annotations

import re
from pathlib import Path

from device_agent.hardware.files import list_folder, path_exists, read_text
from device_agent.hardware.tools import run_tool
from device_agent.probes.base import ProbeResult, describe_absence
from device_agent.probes.network import INTERFACES, is_interface
from device_agent.profile.schema import Profile
from shared.errors import NoData
from shared.protocol.measurements import Absent, Quality, Reading

MAX_BITS_PER_S = 1e11
SIGNAL_DBM = (-120.0, 0.0)
"""Some drivers count signal on a scale of their own, upwards from 0."""


def read(root: Path, profile: Profile, at: float) -> ProbeResult:
    """Read `wifi.<if>_phy_bits_per_s`, `wifi.<if>_signal_dbm`, and the driver's expected throughput, if there is one.

    The rate of the physical layer is measured, by the radio, and is what its name says; what a transfer reaches is
    `link.*`. An interface that sends nothing keeps its lowest rates, so that it may be far below, too. What the driver
    expects (`wifi.<if>_expected_bits_per_s`) is modelled.

    Args:
        root: The board's root folder.
        at: Monotonic seconds of the readings.

    Raises:
        NoData: The board has no radio.
    """
    radios = [
        folder.name
        for folder in list_folder(root / INTERFACES)
        if is_interface(folder.name) and (path_exists(folder / "wireless") or path_exists(folder / "phy80211"))
    ]
    if not radios:
        raise NoData(f"{root / INTERFACES}: no wireless interface")
    found = [_read_radio(root, name, at) for name in radios]
    return ProbeResult(
        readings={key: value for one in found for key, value in one.readings.items()},
        absent={key: value for one in found for key, value in one.absent.items()},
    )


def _read_radio(root: Path, name: str, at: float) -> ProbeResult:
    lacking: dict[str, Absent] = {}
    try:
        said = parse_link(run_tool(root, "iw", "dev", name, "link"), name)
    except NoData as error:
        lacking[f"wifi.{name}_phy_bits_per_s"] = describe_absence(error)
        said = ""
    else:
        said += "\n" + _read_station(root, name)
    figures: list[tuple[str, float | None, Quality]] = [
        ("phy_bits_per_s", parse_bits_per_s(r"tx bitrate:[ \t]*(\d{1,9}(?:\.\d{1,9})?) MBit/s", said), "measured"),
        (
            "expected_bits_per_s",
            parse_bits_per_s(r"expected throughput:[ \t]*(\d{1,9}(?:\.\d{1,9})?)Mbps", said),
            "modelled",
        ),
    ]
    readings = {
        f"wifi.{name}_{key}": Reading(value=value, unit="bits_per_s", source="iw", quality=quality, at=at)
        for key, value, quality in figures
        if value is not None
    }
    if said and f"wifi.{name}_phy_bits_per_s" not in readings:
        lacking[f"wifi.{name}_phy_bits_per_s"] = Absent(lack="not_present", cause=f"the driver of {name} tells no rate")
    try:
        readings[f"wifi.{name}_signal_dbm"] = _read_signal(root, name, said, at)
    except NoData as error:
        lacking[f"wifi.{name}_signal_dbm"] = describe_absence(error)
    return ProbeResult(readings=readings, absent=lacking)


def parse_link(answer: str, name: str) -> str:
    """Return the answer of `iw dev <if> link` for a connection; raises NoData without one, which is no error to iw."""
    if answer.strip().startswith("Not connected"):
        raise NoData(f"{name} is not connected")
    return answer


def parse_bits_per_s(pattern: str, said: str) -> float | None:
    """Parse the first rate in a text, given there in megabits a second; None without one."""
    found = re.search(pattern, said, re.ASCII)
    rate = float(found[1]) * 1e6 if found else 0.0
    return rate if 0 < rate <= MAX_BITS_PER_S else None


def _read_station(root: Path, name: str) -> str:
    """Read the driver's statistics of the access point; some drivers have none."""
    try:
        return run_tool(root, "iw", "dev", name, "station", "dump")
    except NoData:
        return ""


def _read_signal(root: Path, name: str, said: str, at: float) -> Reading:
    """Read the signal from iw's answer, else from the table that older kernels keep. Raises NoData."""
    found, source = re.search(r"signal:[ \t]*(-?\d{1,4})(?: \[[^\]]{0,80}\])? dBm", said, re.ASCII), "iw"
    if found is None:
        table, source = read_text(root / "proc/net/wireless"), "/proc/net/wireless"
        found = re.search(
            rf"^[ \t]*{re.escape(name)}:[ \t]*\S+[ \t]+\S+[ \t]+(-?\d{{1,4}})\.?(?=[ \t]|$)",
            table,
            re.ASCII | re.MULTILINE,
        )
    if found is None:
        raise NoData(f"nothing tells the signal of {name}")
    if not SIGNAL_DBM[0] <= float(found[1]) < SIGNAL_DBM[1]:
        raise NoData(f"{source}: {found[1]} is no signal in dBm", lack="invalid")
    return Reading(value=float(found[1]), unit="dbm", source=source, quality="measured", at=at)
