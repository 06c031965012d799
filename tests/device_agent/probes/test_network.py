"""Network counters and wired rates: loopback and doubles left out, counters of 64 bits, links without a rate."""

from __future__ import annotations

from pathlib import Path

import pytest

from device_agent.hardware.tools import LIVE_ROOT
from device_agent.probes import network
from device_agent.profile.schema import Profile
from shared.errors import NoData
from tests.machine import grow, shared

PROFILE = Profile(schema=1, id="test", name="test")
HEAD = "Inter-|   Receive    |  Transmit\n face |bytes packets errs drop fifo frame compressed multicast|bytes\n"


def row(name: str, received: object, sent: object, blank: str = " ") -> str:
    return f"{name:>6}:{blank}{received} 1 0 0 0 0 0 0 {sent} 1 0 0 0 0 0 0\n"


def values(root: Path) -> dict[str, float]:
    return {name: one.value for name, one in network.read(root, PROFILE, 0.0).readings.items()}


def test_recorded_on_a_pc():
    counters = network.parse_dev(shared("reference", "boards", "net", "proc_net_dev.txt").read_text())
    assert counters == {"vethf345468": (648, 438), "docker0": (2568, 438), "eth0": (874354587, 563352563)}


def test_counters_are_whole_numbers_of_64_bits(tmp_path):
    """No figure is rounded on its way out of the file; some kernels print no blank behind the colon."""
    content = HEAD + row("eth0", 2**64 - 1, 2**63 + 1, blank="")
    assert network.parse_dev(content) == {"eth0": (2**64 - 1, 2**63 + 1)}


def test_where_there_is_hardware_bridges_and_tunnels_are_left_out(tmp_path):
    """They carry the same bytes once more."""
    dev = HEAD + row("lo", 7, 7) + row("docker0", 5, 6) + row("eth0", 1, 2) + row("wlan0", 3, 4)
    grow(
        tmp_path, {"proc/net/dev": dev, "sys/class/net/eth0/device/vendor": "0x1af4", "sys/class/net/wlan0/device/x": 1}
    )
    assert values(tmp_path) == {
        "net.eth0_received_bytes": 1,
        "net.eth0_sent_bytes": 2,
        "net.wlan0_received_bytes": 3,
        "net.wlan0_sent_bytes": 4,
    }


def test_in_a_container_there_is_no_hardware_and_all_count(tmp_path):
    grow(tmp_path, {"proc/net/dev": HEAD + row("lo", 7, 7) + row("eth0", 1, 2)})
    assert values(tmp_path) == {"net.eth0_received_bytes": 1, "net.eth0_sent_bytes": 2}


def test_a_wired_link_tells_its_rate(tmp_path):
    grow(tmp_path, {"proc/net/dev": HEAD + row("eth0", 1, 2), "sys/class/net/eth0/speed": 1000})
    assert values(tmp_path)["net.eth0_speed_bits_per_s"] == pytest.approx(1e9)


@pytest.mark.parametrize("said", ["-1", "0", "65535", "4294967295", ""])
def test_a_link_that_is_down_or_no_wire_has_none(tmp_path, said):
    """A radio's file answers EINVAL, which no file of a test can: an empty one is refused the same way."""
    grow(tmp_path, {"proc/net/dev": HEAD + row("eth0", 1, 2), "sys/class/net/eth0/speed": said})
    found = network.read(tmp_path, PROFILE, 0.0)
    assert found.absent["net.eth0_speed_bits_per_s"].lack == "not_present"
    assert found.readings.keys() == {"net.eth0_received_bytes", "net.eth0_sent_bytes"}


def test_loopback_of_this_machine_answers_with_einval():
    """The real refusal of a link without a rate."""
    if not (LIVE_ROOT / "sys/class/net/lo").exists():
        pytest.skip("there is no loopback")
    with pytest.raises(NoData, match="Invalid argument") as caught:
        network.read_speed(LIVE_ROOT / "sys/class/net/lo")
    assert caught.value.lack == "not_present"


@pytest.mark.parametrize(
    "content",
    ["", HEAD, HEAD + row("lo", 7, 7), HEAD + row("eth0", "x", 1), HEAD + row("eth0", -1, 1), HEAD + "eth0: 1 2\n"],
)
def test_what_has_no_counters_is_refused(tmp_path, content):
    with pytest.raises(NoData):
        network.read(grow(tmp_path, {"proc/net/dev": content}), PROFILE, 0.0)


def test_garbage_costs_its_own_line_only():
    assert network.parse_dev(HEAD + row("bad0", "9" * 400, 1) + row("eth0", 1, 2)) == {"eth0": (1, 2)}
