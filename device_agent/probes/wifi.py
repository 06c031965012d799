"""Wi-Fi probe: PHY rate, signal strength and expected throughput.

The PHY rate is that of the last frame: an upper bound of the goodput, seldom close to it.
"""

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
"""Some drivers use another scale, upwards from 0."""


def read(root: Path, profile: Profile, at: float) -> ProbeResult:
    """Read `wifi.<if>_phy_bits_per_s`, `wifi.<if>_signal_dbm`, and `wifi.<if>_expected_bits_per_s` if there is one.

    The PHY rate is measured by the radio; an idle interface stays at its lowest rates. The expected throughput is the
    driver's model. The rate that transfers reach is `link.*`.

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
    results = [_read_radio(root, name, at) for name in radios]
    return ProbeResult(
        readings={key: value for result in results for key, value in result.readings.items()},
        absent={key: value for result in results for key, value in result.absent.items()},
    )


def _read_radio(root: Path, name: str, at: float) -> ProbeResult:
    lacking: dict[str, Absent] = {}
    try:
        output = parse_link(run_tool(root, ["iw", "dev", name, "link"]), name)
    except NoData as error:
        lacking[f"wifi.{name}_phy_bits_per_s"] = describe_absence(error)
        output = ""
    else:
        output += "\n" + _read_station(root, name)
    figures: list[tuple[str, float | None, Quality]] = [
        ("phy_bits_per_s", parse_bits_per_s(r"tx bitrate:[ \t]*(\d{1,9}(?:\.\d{1,9})?) MBit/s", output), "measured"),
        (
            "expected_bits_per_s",
            parse_bits_per_s(r"expected throughput:[ \t]*(\d{1,9}(?:\.\d{1,9})?)Mbps", output),
            "modelled",
        ),
    ]
    readings = {
        f"wifi.{name}_{key}": Reading(value=value, unit="bits_per_s", source="iw", quality=quality, at=at)
        for key, value, quality in figures
        if value is not None
    }
    if output and f"wifi.{name}_phy_bits_per_s" not in readings:
        lacking[f"wifi.{name}_phy_bits_per_s"] = Absent(
            lack="not_present", cause=f"the driver of {name} reports no rate"
        )
    try:
        readings[f"wifi.{name}_signal_dbm"] = _read_signal(root, name, output, at)
    except NoData as error:
        lacking[f"wifi.{name}_signal_dbm"] = describe_absence(error)
    return ProbeResult(readings=readings, absent=lacking)


def parse_link(answer: str, name: str) -> str:
    """Return the output of `iw dev <if> link`; raises NoData if not connected, for which iw exits with 0."""
    if answer.strip().startswith("Not connected"):
        raise NoData(f"{name} is not connected")
    return answer


def parse_bits_per_s(pattern: str, text: str) -> float | None:
    """Parse the first rate in a text (Mbit/s) into bit/s; None without one."""
    match = re.search(pattern, text, re.ASCII)
    rate = float(match[1]) * 1e6 if match else 0.0
    return rate if 0 < rate <= MAX_BITS_PER_S else None


def _read_station(root: Path, name: str) -> str:
    """Read the driver's station statistics; empty for drivers without them."""
    try:
        return run_tool(root, ["iw", "dev", name, "station", "dump"])
    except NoData:
        return ""


def _read_signal(root: Path, name: str, output: str, at: float) -> Reading:
    """Read the signal from iw's output, else from /proc/net/wireless of older kernels; raises NoData."""
    match, source = re.search(r"signal:[ \t]*(-?\d{1,4})(?: \[[^\]]{0,80}\])? dBm", output, re.ASCII), "iw"
    if match is None:
        table, source = read_text(root / "proc/net/wireless"), "/proc/net/wireless"
        match = re.search(
            rf"^[ \t]*{re.escape(name)}:[ \t]*\S+[ \t]+\S+[ \t]+(-?\d{{1,4}})\.?(?=[ \t]|$)",
            table,
            re.ASCII | re.MULTILINE,
        )
    if match is None:
        raise NoData(f"no source for the signal of {name}")
    if not SIGNAL_DBM[0] <= float(match[1]) < SIGNAL_DBM[1]:
        raise NoData(f"{source}: {match[1]} is not a signal in dBm", lack="invalid")
    return Reading(value=float(match[1]), unit="dbm", source=source, quality="measured", at=at)
