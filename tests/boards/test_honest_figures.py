"""`probe` on boards with incomplete or impossible files: absent or partial, never false."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from device_agent.commands import doctor, probe
from device_agent.probes.power.rails import NAME_PROFILE
from tests.boards import material
from tests.machine import command, grow
from tests.naming import names_all

CPU, HWMON, ZONES = "sys/devices/system/cpu", "sys/class/hwmon", "sys/class/thermal"
ARM = {"proc/cpuinfo": "processor\t: 0\nCPU implementer\t: 0x41\n"}
PI_4B = material.compatible("raspberrypi,4-model-b brcm,bcm2711") | ARM
ORIN_NX = material.compatible("nvidia,p3768-0000+p3767-0000 nvidia,p3767-0000 nvidia,tegra234") | ARM
MEMORY = {"proc/meminfo": "MemTotal: 4000000 kB\nMemAvailable: 3000000 kB\n"}

Shown = Callable[[Mapping[str, object]], dict[str, Any]]


@pytest.fixture
def shown(tmp_path, capsys) -> Shown:
    """Return what `probe --format json` prints of a board of these files."""

    def run(files: Mapping[str, object]) -> dict[str, Any]:
        assert command(probe, "--root", grow(tmp_path / "root", files), "--format", "json") == 0
        return msgspec.json.decode(capsys.readouterr().out)

    return run


def zone(number: int, kind: object, millicelsius: object) -> dict[str, object]:
    return {f"{ZONES}/thermal_zone{number}/type": kind, f"{ZONES}/thermal_zone{number}/temp": millicelsius}


def rail(number: int, label: str, millivolts: object, milliamperes: object) -> dict[str, object]:
    chip = f"{HWMON}/hwmon2"
    return {
        f"{chip}/name": "ina3221",
        f"{chip}/in{number}_label": label,
        f"{chip}/in{number}_input": millivolts,
        f"{chip}/curr{number}_input": milliamperes,
    }


@pytest.mark.parametrize("kind", ["PMIC-Die", "pmic_die", "#lack busy", "#lack denied", ""])
@pytest.mark.parametrize("tree", [ARM, ORIN_NX], ids=["no device tree", "a Jetson"])
def test_a_constant_of_a_power_chip_is_no_temperature_of_a_board(shown, kind, tree) -> None:
    """Also where no profile knows of it, and where the zone does not say what it is."""
    said = shown(tree | zone(0, "cpu-thermal", 45000) | zone(1, kind, 100000))
    assert said["readings"]["thermal.hottest_celsius"]["value"] == 45.0
    assert 100.0 not in {one["value"] for one in said["readings"].values()}


def test_a_power_chips_zone_alone_is_not_the_hottest_of_a_board(shown) -> None:
    said = shown(ARM | zone(0, "pm8998-pmic-thermal", 37000))
    assert "thermal.hottest_celsius" not in said["readings"]
    assert said["absent"]["thermal.hottest_celsius"]["lack"] == "not_present"


def test_the_hottest_of_some_is_marked(shown) -> None:
    said = shown(ORIN_NX | zone(0, "cpu-thermal", 45000) | zone(1, "tj-thermal", "#lack busy"))
    hottest = said["readings"]["thermal.hottest_celsius"]
    assert (hottest["value"], names_all(hottest["source"], 1, 2)) == (45.0, True)


@pytest.mark.parametrize("refused", ["#lack denied", "-5", "garbage"])
def test_counters_without_one_of_them_are_no_sum(shown, refused) -> None:
    """Twelve over-currents of which ten cannot be read are not two, and not none."""
    chip = {f"{HWMON}/hwmon5/name": "soctherm_oc", f"{HWMON}/hwmon5/oc1_event_cnt": 0}
    counts = {f"{HWMON}/hwmon5/oc2_event_cnt": 0, f"{HWMON}/hwmon5/oc3_event_cnt": refused}
    said = shown(ORIN_NX | chip | counts)
    assert said["absent"]["throttle.overcurrent_count"]["lack"] in ("denied", "invalid")
    assert not {"throttle.overcurrent_count", "throttle.since_boot_flag"} & said["readings"].keys()


def test_a_mean_clock_without_a_cluster_is_none(shown) -> None:
    """1.037 GHz of two clusters, of which one is denied, is not the other one's 1.190."""
    files = material.policy(0, range(4), 700, 1984) | material.policy(4, range(4, 8), 700, 1984)
    files |= material.clocks({0: 1190.4, 4: 883.2}) | {f"{CPU}/online": "0-7\n"}
    assert shown(ORIN_NX | files)["readings"]["cpu.f_hertz"]["value"] == pytest.approx(1.0368e9)
    said = shown(ORIN_NX | files | {f"{CPU}/cpufreq/policy4/scaling_cur_freq": "#lack denied"})
    assert said["absent"]["cpu.f_hertz"]["lack"] == "denied"
    assert said["readings"]["cpu.policy0_hertz"]["value"] == 1190.4e6
    said = shown(ORIN_NX | files | {f"{CPU}/cpufreq/policy4/affected_cpus": "garbage"})
    assert said["absent"]["cpu.f_hertz"]["lack"] == "invalid"


@pytest.mark.parametrize(
    "answer",
    [None, "#lack denied", 'error=1 error_msg="Command not registered"', "throttled=", "throttled=0xdeadbeef", ""],
)
def test_a_pi_whose_firmware_refuses_does_not_say_that_it_runs_at_full_speed(shown, tmp_path, capsys, answer) -> None:
    """83 °C, 1.0 of 1.8 GHz, and a cooling device at rest, for the firmware slows it down by itself."""
    files = PI_4B | zone(0, "cpu-thermal", 83000) | material.policy(0, range(4), 600, 1800)
    files |= material.clocks({0: 1000}) | {f"{CPU}/online": "0-3\n"}
    files |= {f"{ZONES}/cooling_device0/type": "cpufreq-cpu0", f"{ZONES}/cooling_device0/cur_state": 0}
    files |= {} if answer is None else {"tools/vcgencmd get_throttled": answer}
    said = shown(files)
    assert "throttle.now_flag" not in said["readings"]
    assert said["absent"]["throttle.now_flag"]
    assert said["facts"]["throttle"] == "unknown"
    command(doctor, "--root", tmp_path / "root")
    line = next(line for line in capsys.readouterr().out.splitlines() if "throttling" in line)
    assert line.startswith("WARN")
    heated = shown(files | {f"{ZONES}/cooling_device0/cur_state": 3})
    assert heated["readings"]["throttle.now_flag"]["value"] == 1


@pytest.mark.parametrize(
    ("files", "name"),
    [
        (ORIN_NX | rail(1, "VDD_IN", 5000, -99840000), "power.VDD_IN_watts"),
        (ORIN_NX | rail(1, "VDD_IN", -5000, -1800), "power.VDD_IN_watts"),
        (ORIN_NX | rail(1, "VDD_IN", 5000, 1800) | rail(2, "VDD_SOC", 5000, 100000), "power.VDD_SOC_watts"),
        (ORIN_NX | rail(1, "VDD_IN", 5000, "1_800"), "power.VDD_IN_watts"),
        (ORIN_NX | rail(1, "VDD_IN", 5000, "١٨٠٠"), "power.VDD_IN_watts"),
        (ORIN_NX | {"tools/tegrastats --interval 100": "VDD_IN 900000000mW/1mW"}, "power.VDD_IN_watts"),
        (ARM | {f"{CPU}/online": "0-9999\n"}, "cpu.online_count"),
        (ARM | {f"{CPU}/online": "3-0\n"}, "cpu.online_count"),
        (MEMORY | {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": "-1"}, "memory.limit_bytes"),
        ({"proc/meminfo": "MemTotal: 4000 kB\nMemAvailable: 9000 kB\n"}, "memory.available_bytes"),
        ({"proc/meminfo": f"MemTotal: {10**15 - 1} kB\n"}, "memory"),
        (
            {"proc/net/dev": "eth0: 1 0 0 0 0 0 0 0 1 0 0 0 0 0 0 0", "sys/class/net/eth0/speed": 10**15},
            "net.eth0_speed_bits_per_s",
        ),
        ({"proc/net/dev": f"eth0: {10**20 - 1} 0 0 0 0 0 0 0 1 0 0 0 0 0 0 0"}, "net.eth0_received_bytes"),
        ({"proc/stat": f"cpu {10**20 - 1} 0 0 0 0 0 0 0"}, "cputime.busy_seconds"),
        (ARM | zone(0, "cpu-thermal", "4_5000"), "thermal.cpu-thermal_celsius"),
        (ARM | zone(0, "cpu-thermal", 999000), "thermal.cpu-thermal_celsius"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_a_named_absence(shown, files, name) -> None:
    said = shown(files)
    assert name not in said["readings"]
    assert said["absent"][name]["lack"] == "invalid"
    assert said["absent"][name]["cause"]


def test_a_total_with_a_rail_that_cannot_be_is_none(shown) -> None:
    said = shown(ORIN_NX | rail(1, "VDD_IN", 5000, -99840000))
    assert "power.total_watts" not in said["readings"]


def test_rails_that_no_profile_understands_are_shown_with_what_to_do(tmp_path, capsys) -> None:
    """A board without a device tree, as in a container: rails, no total, and that a profile is to be named."""
    root = grow(tmp_path, ARM | rail(1, "VDD_IN", 5000, 1800))
    assert command(probe, "--root", root) == 0
    out = capsys.readouterr().out
    assert "generic-arm" in out
    assert "power.VDD_IN_watts" in out
    assert "9 W" in out
    assert "power.total_watts  9" not in out
    assert NAME_PROFILE in out
    assert command(probe, "--root", root, "--profile", "jetson-orin-nx") == 0
    assert NAME_PROFILE not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("files", "source"),
    [
        ({f"{CPU}/online": "0-1\n"}, f"{CPU}/online"),
        ({"proc/cpuinfo": "processor\t: 0\nprocessor\t: 1\n"}, "proc/cpuinfo"),
    ],
)
def test_the_count_of_cpus_names_the_file_it_was_read_from(shown, files, source) -> None:
    count = shown(files)["readings"]["cpu.online_count"]
    assert (count["value"], count["source"]) == (2, source)


def test_two_batteries_of_which_one_says_nothing_are_no_total(shown) -> None:
    def battery(name: str, status: str) -> dict[str, object]:
        folder = f"sys/class/power_supply/{name}"
        return {f"{folder}/type": "Battery", f"{folder}/status": status, f"{folder}/power_now": 5_000_000}

    x86 = {"proc/cpuinfo": "vendor_id\t: GenuineIntel\n"}
    both = x86 | battery("BAT0", "Discharging") | battery("BAT1", "Discharging")
    assert shown(both)["readings"]["power.total_watts"]["value"] == 10.0
    for spoilt in ({"status": "#lack denied"}, {"status": "garbage"}, {"type": "#lack busy"}, {"type": "garbage"}):
        more = {f"sys/class/power_supply/BAT1/{name}": content for name, content in spoilt.items()}
        assert "power.total_watts" not in shown(both | more)["readings"]


def test_a_pipe_and_an_endless_device_among_recorded_tools_end_nothing(tmp_path, capsys) -> None:
    root = Path(grow(tmp_path, PI_4B | {"tools/none": ""}))
    (root / "tools/vcgencmd measure_clock arm").symlink_to("/dev/zero")
    os.mkfifo(root / "tools/vcgencmd get_throttled")
    assert command(probe, "--root", root, "--format", "json") == 0
    said = msgspec.json.decode(capsys.readouterr().out)
    assert not {"cpu.f_hertz", "throttle.now_flag"} & said["readings"].keys()
