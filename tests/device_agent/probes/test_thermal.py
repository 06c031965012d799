"""Temperatures: whatever a zone does, the answer is a figure or a named lack."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from device_agent.probes import thermal
from device_agent.probes.base import ProbeResult
from device_agent.profile.schema import Cpu, Thermal
from shared.errors import NoData
from tests.machine import busy, grow, profile, shared
from tests.naming import names_all, naming

ZONES = "sys/class/thermal"
HWMON = "sys/class/hwmon"


def zone(number: int, kind: str, millicelsius: object) -> dict[str, object]:
    return {f"{ZONES}/thermal_zone{number}/type": kind, f"{ZONES}/thermal_zone{number}/temp": millicelsius}


def celsius(found: ProbeResult) -> dict[str, float]:
    return {name.removeprefix("thermal.").removesuffix("_celsius"): one.value for name, one in found.readings.items()}


def test_zones_are_named_by_type_and_the_hottest_is_told(tmp_path) -> None:
    root = grow(tmp_path, zone(0, "cpu-thermal", 49687) | zone(1, "gpu-thermal", 51250) | zone(10, "tj-thermal", 50000))
    found = thermal.read(root, profile(thermal=Thermal(zones={"cpu-thermal": "cpu"})), 7.0)
    assert celsius(found) == {"cpu-thermal": 49.687, "gpu-thermal": 51.25, "tj-thermal": 50.0, "hottest": 51.25}
    assert found.absent == {}
    hottest, cpu = found.readings["thermal.hottest_celsius"], found.readings["thermal.cpu-thermal_celsius"]
    assert (hottest.source, hottest.unit, hottest.quality, hottest.at) == ("thermal_zone1", "celsius", "measured", 7.0)
    assert cpu.source == "thermal_zone0 (cpu)"


def test_two_zones_of_one_type_are_told_apart_in_the_order_of_their_numbers(tmp_path) -> None:
    """Number 10 comes after 2; a type with blanks is a word of the name all the same."""
    root = grow(tmp_path, zone(10, "acpitz", 30000) | zone(2, "acpitz", 20000) | zone(3, "INT3400 Thermal", 25000))
    assert celsius(thermal.read(root, profile(), 0)) == {
        "acpitz": 20.0,
        "acpitz-2": 30.0,
        "INT3400-Thermal": 25.0,
        "hottest": 30.0,
    }


def test_of_thousands_of_zones_the_hottest_are_told_and_how_many_are_not(tmp_path) -> None:
    """A report of 4,000 zones was one of 400 kB, every half a minute."""
    files: dict[str, object] = {}
    for number in range(200):
        files |= zone(number, f"zone{number}", 20000 + 100 * number if number < 100 else "garbage")
    found = thermal.read(grow(tmp_path, files), profile(), 0)
    assert celsius(found) == {f"zone{number}": 20 + number / 10 for number in range(36, 100)} | {"hottest": 29.9}
    assert len(found.absent) == 64
    assert names_all(found.facts["thermal"], 200, 64)


def test_what_means_nothing_is_left_out_and_what_cannot_be_is_invalid(tmp_path) -> None:
    """PMIC-Die is a constant; -256 celsius is a block that is off; 126 is none that a board survives."""
    root = grow(
        tmp_path,
        zone(0, "PMIC-Die", 100000) | zone(1, "cv0", -256000) | zone(2, "hot", 126000) | zone(3, "cpu", 40000)
        | zone(4, "empty", "") | zone(5, "words", "garbage"),
    )  # fmt: skip
    found = thermal.read(root, profile(thermal=Thermal(ignore=("PMIC-Die",))), 0)
    assert celsius(found) == {"cpu": 40.0, "hottest": 40.0}
    assert {name: lack.lack for name, lack in found.absent.items()} == {
        f"thermal.{kind}_celsius": "invalid" for kind in ("cv0", "hot", "empty", "words")
    }
    assert "-256" in found.absent["thermal.cv0_celsius"].cause


def test_a_zone_whose_block_is_off_is_busy(tmp_path) -> None:
    """EAGAIN, as a powered-down zone answers: here a pipe that nobody has written to yet."""
    root = grow(tmp_path, zone(0, "cpu-thermal", 49687) | {f"{ZONES}/thermal_zone1/type": "cv0-thermal"})
    with busy(root / ZONES / "thermal_zone1/temp"):
        found = thermal.read(root, profile(), 0)
    assert celsius(found) == {"cpu-thermal": 49.687, "hottest": 49.687}
    assert {name: lack.lack for name, lack in found.absent.items()} == {"thermal.cv0-thermal_celsius": "busy"}


def test_what_cannot_be_opened_is_a_lack(tmp_path, monkeypatch) -> None:
    """A zone with no temp file, one whose temp is a socket."""
    root = grow(tmp_path, {f"{ZONES}/thermal_zone0/type": "a", f"{ZONES}/thermal_zone1/type": "b"})
    monkeypatch.chdir(root / ZONES)  # a socket's address has room for 107 characters
    with socket.socket(socket.AF_UNIX) as one:
        one.bind("thermal_zone1/temp")
        found = thermal.read(root, profile(), 0)
    lacks = {name: lack.lack for name, lack in found.absent.items()}
    assert lacks.pop("thermal.hottest_celsius") == "not_present"
    assert lacks == {"thermal.a_celsius": "not_present", "thermal.b_celsius": "not_present"}
    assert found.readings == {}


def test_chips_of_cpus_serve_where_no_zone_is_the_same_sensor(tmp_path) -> None:
    """`cpu_thermal` is the zone `cpu-thermal` again; of coretemp the hottest input counts; a disk is no CPU."""
    chips = {
        f"{HWMON}/hwmon0/name": "cpu_thermal",
        f"{HWMON}/hwmon0/temp1_input": 44600,
        f"{HWMON}/hwmon1/name": "coretemp",
        f"{HWMON}/hwmon1/temp1_input": 50000,
        f"{HWMON}/hwmon1/temp2_input": 57000,
        f"{HWMON}/hwmon2/name": "nvme",
        f"{HWMON}/hwmon2/temp1_input": 60000,
        f"{HWMON}/hwmon3/name": "k10temp",
    }
    root = grow(tmp_path / "chips", chips)
    assert celsius(thermal.read(root, profile(), 0)) == {"cpu_thermal": 44.6, "coretemp": 57.0, "hottest": 57.0}
    root = grow(tmp_path / "both", chips | zone(0, "cpu-thermal", 45000))
    found = thermal.read(root, profile(), 0)
    assert celsius(found) == {"cpu-thermal": 45.0, "coretemp": 57.0, "hottest": 57.0}
    assert list(found.absent) == ["thermal.k10temp_celsius"]


def test_a_pi_asks_its_firmware_last(tmp_path) -> None:
    answer = {"tools/vcgencmd measure_temp": shared("reference/boards/rpi-4b/measure_temp.txt").read_text().strip()}
    pi = profile(cpu=Cpu(sources=("firmware", "cpufreq")))
    assert celsius(thermal.read(grow(tmp_path / "a", answer), pi, 0)) == {"firmware": 43.8, "hottest": 43.8}
    both = grow(tmp_path / "b", answer | zone(0, "cpu-thermal", 44000))
    assert celsius(thermal.read(both, pi, 0)) == {"cpu-thermal": 44.0, "hottest": 44.0}
    with pytest.raises(NoData, match=naming("hwmon")):  # another board is not asked
        thermal.read(tmp_path / "a", profile(), 0)


@pytest.mark.parametrize("kind", ["acpitz", "cpu-thermal"])
def test_exactly_nothing_is_a_dead_sensor(tmp_path, kind) -> None:
    """pi-hole#2807: an acpitz that says 0.0 for ever was measured, and alone the hottest."""
    found = thermal.read(grow(tmp_path, zone(0, kind, 0)), profile(), 0)
    assert found.readings == {}
    assert {lack.lack for lack in found.absent.values()} == {"invalid"}


@pytest.mark.parametrize(
    ("inputs", "hottest"), [((0, 0, -49000), None), ((61000, -49000, -49000), 61.0), ((0, 45000), 45.0)]
)
def test_dead_inputs_of_a_chip_are_passed_over(tmp_path, inputs, hottest) -> None:
    """btop#167: k10temp with Tctl 0 and dies at -49; a live input counts all the same."""
    files = {f"{HWMON}/hwmon0/temp{number}_input": value for number, value in enumerate(inputs, 1)}
    found = thermal.read(grow(tmp_path, files | {f"{HWMON}/hwmon0/name": "k10temp"}), profile(), 0)
    assert celsius(found) == ({} if hottest is None else {"k10temp": hottest, "hottest": hottest})
    assert {one.lack for one in found.absent.values()} == (set() if hottest else {"invalid"})


@pytest.mark.parametrize("millicelsius", [-650788984, 0, 999000, -256000])
def test_a_zone_with_an_absurd_value_does_not_hide_the_firmwares(tmp_path, millicelsius) -> None:
    """raspberrypi/firmware#133."""
    pi = profile(cpu=Cpu(sources=("firmware", "cpufreq")))
    files = zone(0, "cpu-thermal", millicelsius) | {"tools/vcgencmd measure_temp": "temp=51.5'C"}
    found = thermal.read(grow(tmp_path, files), pi, 0)
    assert celsius(found) == {"firmware": 51.5, "hottest": 51.5}
    assert found.absent["thermal.cpu-thermal_celsius"].lack == "invalid"


def test_no_thermometer_is_no_figure(tmp_path) -> None:
    with pytest.raises(NoData) as told:
        thermal.read(tmp_path, profile(), 0)
    assert told.value.lack == "not_present"


def test_a_recorded_orin_nano(tmp_path) -> None:
    """Six zones, three of which answered EAGAIN when they were recorded."""
    lines = shared("reference/boards/jetson-orin-nano/thermal_zone_eagain_observed.txt").read_text().splitlines()
    files: dict[str, object] = {}
    for number, line in enumerate(lines):
        kind, value, *_ = line.split("\t")
        files |= zone(number, kind, value if value.isdigit() else "#lack busy")
    found = thermal.read(grow(tmp_path, files), profile(), 0)
    assert celsius(found) == {"cpu-thermal": 49.687, "soc2-thermal": 49.062, "soc0-thermal": 50.0, "hottest": 50.0}
    assert {name: lack.lack for name, lack in found.absent.items()} == {
        f"thermal.cv{number}-thermal_celsius": "busy" for number in range(3)
    }


def test_a_recorded_tree(tmp_path) -> None:
    """Its second zone says -44 celsius, which is out of what a board survives."""
    found = thermal.read(recorded(tmp_path, "x86-generic/thermal_tree.tsv"), profile(), 0)
    assert celsius(found) == {"bcm2835_thermal": 49.925, "hottest": 49.925}
    assert found.absent["thermal.acpitz_celsius"].lack == "invalid"


def recorded(root: Path, name: str) -> Path:
    lines = shared("reference/boards", name).read_text().splitlines()
    return grow(root, {path.strip("/"): value for _, path, value in (line.split("\t") for line in lines)})
