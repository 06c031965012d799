"""Figures as people read them."""

from __future__ import annotations

import re

import pytest

from device_agent.commands.diagnosis.board_text import MISSING_FIGURES, format_columns, format_table
from device_agent.probes.base import ProbeResult
from device_agent.profile.load import UNKNOWN_PROFILE
from device_agent.profile.schema import Profile
from shared.protocol.measurements import Absent, Reading
from shared.protocol.units import format_figure

PROFILE = Profile(schema=1, id="some-board", name="Some Board")


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("cpu.f_hertz", 1.5104e9, "1.51 GHz"),
        ("cpu.f_hertz", 729.6e6, "729.6 MHz"),
        ("power.total_watts", 5.145, "5.145 W"),
        ("power.package-0_joules", 240422.366, "240.4 kJ"),
        ("thermal.cpu_celsius", -5.25, "-5.25 °C"),
        ("memory.total_bytes", 8 * 2**30, "8 GiB"),
        ("disk.free_bytes", 1023.0, "1023 B"),
        ("net.eth0_sent_bits_per_s", 39.4e6, "39.4 Mbit/s"),
        ("throttle.overcurrent_per_s", 1.5, "1.5 /s"),
        ("wifi.wlan0_signal_dbm", -39.0, "-39 dBm"),
        ("memory.pressure_ratio", 0.025, "2.5 %"),
        ("throttle.now_flag", 1.0, "yes"),
        ("throttle.now_flag", 0.0, "no"),
        ("throttle.overcurrent_count", 27390.0, "27390"),
        ("cputime.total_seconds", 123456.7, "123457 s"),
        ("of.no_known_ending", 3.0, "3"),
    ],
)
def test_a_figure_has_the_unit_of_its_name_at_everyday_size(name, value, shown) -> None:
    assert format_figure(name, value) == shown


def cells_of(table: str) -> list[list[str]]:
    return [re.split(" {2,}", line) for line in table.splitlines()]


def test_readings_and_lacks_stand_in_columns_with_their_sources() -> None:
    reading = Reading(value=9.0, unit="watts", source="ina3221 VDD_IN", quality="measured", at=0.0, uncertainty=0.27)
    found = ProbeResult(
        readings={"power.total_watts": reading},
        absent={"thermal": Absent(lack="not_present", cause="no zone"), "cpu.f_hertz": Absent(lack="busy")},
        facts={"mode": "15W"},
    )
    facts, readings, lacks, advice = "\n".join(format_table(PROFILE, found)).split("\n\n")
    assert cells_of(facts) == [["board", "some-board", "Some Board"], ["mode", "15W"]]
    assert cells_of(readings)[1:] == [["power.total_watts", "9 W", "0.27 W", "measured", "ina3221 VDD_IN"]]
    assert cells_of(lacks)[1:] == [["cpu.f_hertz", "busy"], ["thermal", "not present", "no zone"]]
    assert advice == dict(MISSING_FIGURES)["thermal.hottest_celsius"]


def test_a_machine_without_sensors_is_told_what_that_means() -> None:
    """Three things are missing; for the power there is something to be done."""
    lines = format_table(PROFILE, ProbeResult())
    assert len(lines) == 5
    assert any("[board.meter]" in line and "calibrate" in line for line in lines)


def test_a_board_that_nobody_described_is_asked_for_a_recording() -> None:
    assert any("--record" in line for line in format_table(UNKNOWN_PROFILE, ProbeResult()))
    assert not any("--record" in line for line in format_table(PROFILE, ProbeResult()))


def test_what_a_device_tree_says_cannot_drive_the_terminal() -> None:
    assert format_columns([("model", "a\x1b[2Jb\nc")]) == ["model  a?[2Jb?c"]
