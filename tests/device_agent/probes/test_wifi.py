"""What a radio says of itself: its rate, its signal, what its driver expects."""

from __future__ import annotations

import pytest

from device_agent.probes import wifi
from shared.errors import NoData
from tests.machine import grow, profile, shared
from tests.naming import naming

RADIO = {"sys/class/net/wlan0/phy80211/name": "phy0"}
CABLE = {"sys/class/net/eth0/speed": 1000}
LINK, DUMP = "tools/iw dev wlan0 link", "tools/iw dev wlan0 station dump"
TABLE = "Inter-| sta-|   Quality\n face | tus | link level noise\n"


def text(name: str) -> str:
    return shared("reference/boards/wifi", name).read_text()


def read(root):
    return wifi.read(root, profile(), 2.0)


def values(found) -> dict[str, float]:
    return {name: one.value for name, one in found.readings.items()}


def lacks(found) -> dict[str, str]:
    return {name: lack.lack for name, lack in found.absent.items()}


@pytest.mark.parametrize("dump", ["iw_station_dump_empty_broadcom.txt", None])
def test_a_recorded_link(tmp_path, dump) -> None:
    """A driver that knows nothing of its station, and a tool that fails, take nothing away."""
    files = RADIO | CABLE | {LINK: text("iw_dev_link_vht80.txt")} | ({DUMP: text(dump)} if dump else {})
    found = read(grow(tmp_path, files))
    assert values(found) == {"wifi.wlan0_phy_bits_per_s": 433.3e6, "wifi.wlan0_signal_dbm": -39}
    assert found.absent == {}
    rate = found.readings["wifi.wlan0_phy_bits_per_s"]
    assert (rate.source, rate.quality, rate.unit, rate.at) == ("iw", "measured", "bits_per_s", 2.0)


def test_a_recorded_station_adds_what_the_driver_expects(tmp_path) -> None:
    """144.4 Mbit/s of the radio are 47.76 expected: a model of the driver's, and said to be one."""
    files = RADIO | {
        LINK: "Connected to aa:bb:cc:dd:ee:ff (on wlan0)",
        DUMP: text("iw_station_dump_expected_throughput.txt"),
    }
    found = read(grow(tmp_path, files))
    assert values(found) == {
        "wifi.wlan0_phy_bits_per_s": 144.4e6,
        "wifi.wlan0_expected_bits_per_s": 47.76e6,
        "wifi.wlan0_signal_dbm": -53,
    }
    assert found.readings["wifi.wlan0_expected_bits_per_s"].quality == "modelled"


def test_not_connected_is_not_an_error_of_the_tool_and_no_rate_either(tmp_path) -> None:
    table = TABLE + " wlan0: 0000    0.  -256.  -256.       0      0      0      0      0        0\n"
    files = RADIO | {LINK: text("iw_dev_link_not_connected.txt"), "proc/net/wireless": table}
    found = read(grow(tmp_path, files))
    assert values(found) == {}
    assert lacks(found) == {"wifi.wlan0_phy_bits_per_s": "not_present", "wifi.wlan0_signal_dbm": "invalid"}


def test_without_the_tool_the_old_table_has_the_signal(tmp_path) -> None:
    table = TABLE + " wlan0: 0000   54.  -56.  -256        0      0      0      0      0        0\n"
    found = read(grow(tmp_path, RADIO | {"proc/net/wireless": table}))
    assert values(found) == {"wifi.wlan0_signal_dbm": -56}
    assert found.readings["wifi.wlan0_signal_dbm"].source == "/proc/net/wireless"
    assert lacks(found) == {"wifi.wlan0_phy_bits_per_s": "not_present"}


def test_the_recorded_table_counts_on_a_scale_of_its_own(tmp_path) -> None:
    """A level of 3 is no dBm."""
    table = shared("reference/boards/net/proc_net_wireless.txt").read_text()
    assert lacks(read(grow(tmp_path, RADIO | {"proc/net/wireless": table})))["wifi.wlan0_signal_dbm"] == "invalid"


def test_a_link_that_tells_no_rate(tmp_path) -> None:
    found = read(grow(tmp_path, RADIO | {LINK: "Connected to aa:bb:cc:dd:ee:ff (on wlan0)\n\tsignal: -70 dBm"}))
    assert values(found) == {"wifi.wlan0_signal_dbm": -70}
    assert lacks(found) == {"wifi.wlan0_phy_bits_per_s": "not_present"}


def test_each_radio_for_itself(tmp_path) -> None:
    """Old drivers have the folder `wireless` only; a cable has neither and is not asked."""
    files = RADIO | CABLE | {"sys/class/net/wlan1/wireless/link": 1, LINK: text("iw_dev_link_vht80.txt")}
    found = read(grow(tmp_path, files))
    assert {name.split("_")[0] for name in found.readings} == {"wifi.wlan0"}
    assert {name.split("_")[0] for name in found.absent} == {"wifi.wlan1"}


def test_a_board_without_a_radio(tmp_path) -> None:
    with pytest.raises(NoData, match=naming(tmp_path / "sys/class/net")):
        read(grow(tmp_path, CABLE))
