"""Nothing that tells one board or its owner from another survives, and every figure does."""

from __future__ import annotations

import ipaddress
import time
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.runtime.diagnosis.redaction import redact

AROUND = st.text(alphabet=st.characters(codec="ascii"), max_size=20)
HEX = st.text(alphabet="0123456789abcdefABCDEF", min_size=12, max_size=12)


@given(AROUND, st.binary(min_size=6, max_size=6).filter(any), st.sampled_from(":-"), AROUND)
def test_no_mac_address_survives(before, address, between, after) -> None:
    mac = address.hex(between)
    assert mac not in redact(f"{before}{mac}{after}")
    assert mac.upper() not in redact(f"{before}{mac.upper()}{after}")


LABELS = ("Serial", "serial-number", "POWER_SUPPLY_SERIAL_NUMBER", "SSID", "Hostname")
SECRETS = st.text("GHJKMNPQRSTVXYZ0123456789", min_size=6, max_size=20)


@given(st.sampled_from(LABELS), st.sampled_from([":", "\t\t: ", "=", " = "]), SECRETS)
def test_nothing_survives_after_a_label_that_gives_it_away(label, between, secret) -> None:
    """The label stays, so that whatever parses the lines goes on to find as many of them."""
    text = redact(f"Hardware : BCM\n{label}{between}{secret}\nRevision : a03111")
    assert secret not in text
    assert text.endswith("Revision : a03111")
    assert f"{label}{between}-" in text


@given(AROUND, st.uuids(), AROUND)
def test_no_uuid_and_no_machine_id_survives(before, identity: uuid.UUID, after) -> None:
    assert str(identity) not in redact(f"{before}{identity}{after}")
    with_letters = identity.hex[:-1] + "a"
    assert with_letters not in redact(f"{before}{with_letters}{after}")


@given(st.ip_addresses(v=4).filter(lambda one: int(one) > 0))
def test_no_ipv4_address_survives(address) -> None:
    assert str(address) not in redact(f"inet {address}/24 brd")


@given(st.ip_addresses(v=6).filter(lambda one: int(one) > 1))
def test_no_ipv6_address_survives(address: ipaddress.IPv6Address) -> None:
    assert str(address) not in redact(f"inet6 {address}/64 scope")
    assert address.exploded not in redact(f"inet6 {address.exploded}%eth0")


@given(HEX)
def test_no_interface_keeps_the_mac_address_in_its_name(digits) -> None:
    assert redact(f"enx{digits}: 5 6") == "enx000000000000: 5 6"


@given(st.text(max_size=200))
def test_what_was_redacted_stays_as_it_is(text) -> None:
    """So a recording can be recorded again, and a test can tell that nothing was left in one."""
    once = redact(text)
    assert redact(once) == once


@given(st.lists(st.integers(min_value=-(10**17), max_value=10**17)), st.floats(allow_nan=False, allow_infinity=False))
def test_every_figure_survives(numbers, figure) -> None:
    text = " ".join(map(str, numbers)) + f"\n{figure:f}\n"
    assert redact(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "nvidia,p3768-0000+p3767-0003\0nvidia,p3767-0003\0nvidia,tegra234",
        "raspberrypi,4-model-b\0brcm,bcm2711",
        "frequency(48)=1000212224",
        "throttled=0x50005",
        "# R36 (release), REVISION: 4.3, GCID: 1, BOARD: generic",
        "0::/user.slice/user-1000.slice\n",
        "5.15.148-tegra",
        "11-15-2024 08:38:09 RAM 6185/7620MB (lfb 8x2MB)",
        "iio:device0",
        "  eth0: 874354587 1036395    0    0",
        "0x00030080",
    ],
)
def test_what_probes_read_stays_letter_by_letter(text) -> None:
    assert redact(text, ("raspberrypi", "tegra", "eth")) == text


def test_the_hosts_name_goes_where_it_stands_alone() -> None:
    assert redact("Linux attic 6.1 (attic)\n", ("attic", "")) == "Linux host 6.1 (host)\n"


def test_what_iw_says_of_a_network() -> None:
    said = "Connected to e4:c0:e2:db:1d:45 (on wlan0)\n\tSSID: My Home\n\tssid My Home\n\ttx bitrate: 433.3 MBit/s"
    assert redact(said) == (
        "Connected to 00:00:00:00:00:00 (on wlan0)\n\tSSID: -\n\tssid -\n\ttx bitrate: 433.3 MBit/s"
    )


@pytest.mark.parametrize("unit", ["a", ":", "a:", "1.", "aa:", "serial ", "0000-", "ssid\n", " ", "ssid: x\n"])
def test_a_long_file_takes_no_time(unit) -> None:
    """64 KiB of what a pattern might go back and forth in, which is as long as a recorded file may be."""
    before = time.process_time()
    redact(unit * (65536 // len(unit)), ("host",))
    assert time.process_time() - before < 60.0
