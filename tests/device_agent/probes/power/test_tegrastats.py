"""Every form of line that tegrastats was seen to print."""

from __future__ import annotations

import pytest

from device_agent.probes.power import tegrastats
from device_agent.probes.power.tegrastats import CpuLoad, parse_line
from shared.errors import NoData
from tests.machine import grow, shared

NANO = {"POM_5V_IN": 0.9, "POM_5V_GPU": 0.0, "POM_5V_CPU": 0.123}
SUDO = {"POM_5V_IN": 0.933, "POM_5V_GPU": 0.0, "POM_5V_CPU": 0.084}
TX1 = {"VDD_IN": 2.532, "VDD_CPU": 0.076, "VDD_GPU": 0.019}
XAVIER_31 = {"GPU": 0.0, "CPU": 0.216, "SOC": 0.864, "CV": 0.0, "VDDRQ": 0.144, "SYS5V": 1.889}
XAVIER_32 = {"GPU": 1.155, "CPU": 0.385, "SOC": 2.504, "CV": 0.0, "VDDRQ": 0.192, "SYS5V": 2.692}
RECORDED = [
    # file, line, watts, CPU temperature, clocks of the first and last CPU in MHz, RAM in MiB used and there
    ("jetson-nano/tegrastats_l4t32.txt", 0, NANO, 40.5, (102, 102), (613, 3964)),
    ("jetson-nano/tegrastats_l4t32_sudo_iram_template.txt", 0, SUDO, 23.5, (102, 102), (331, 3964)),
    ("jetson-tx1/tegrastats_sudo.txt", 0, TX1, 37.5, (102, 102), (1179, 3983)),
    ("jetson-agx-xavier/tegrastats_l4t31.txt", 0, XAVIER_31, 33.5, (1190, 1190), (1903, 15692)),
    ("jetson-agx-xavier/tegrastats_l4t32_wifi_temp.txt", 0, XAVIER_32, 27.5, (2265, 2265), (407, 15823)),
    *(
        (
            "jetson-orin-nano/tegrastats_jp6_lines.txt",
            line,
            {"VDD_IN": total, "VDD_CPU_GPU_CV": compute, "VDD_SOC": soc},
            celsius,
            mhz,
            ram,
        )
        for line, total, compute, soc, celsius, mhz, ram in [
            (0, 12.479, 4.667, 2.817, 53.968, (729, 729), (6185, 7620)),
            (1, 4.824, 0.518, 1.475, 50.031, (1420, 729), (3452, 7620)),
            (2, 4.761, 0.515, 1.428, 48.468, (729, 729), (775, 7620)),
            (3, 4.046, 0.720, 1.201, 45.968, (1728, 729), (2250, 7620)),
            (4, 4.548, 0.483, 1.489, 49.843, (729, 729), (974, 7546)),
        ]
    ),
    (
        "jetson-agx-orin/tegrastats_lines.txt",
        2,
        {"VDD_GPU_SOC": 3.034, "VDD_CPU_CV": 1.137, "VIN_SYS_5V0": 4.939},
        47.906,
        (729, 729),
        (8207, 62878),
    ),
]


@pytest.mark.parametrize(("file", "line", "watts", "celsius", "mhz", "ram"), RECORDED)
def test_a_recorded_line_gives_its_figures(file, line, watts, celsius, mhz, ram) -> None:
    """What is now, neither the average since the start nor the maximum; no swap taken for a rail."""
    stats = parse_line(shared("reference", "boards", *file.split("/")).read_text().splitlines()[line])
    missing = {label for label in watts if label not in stats.watts}
    assert missing == set()
    assert {label: stats.watts[label] for label in watts} == pytest.approx(watts)
    assert stats.watts.keys() - watts.keys() <= {"VDDQ_VDD2_1V8AO"}
    assert next(value for name, value in stats.celsius.items() if name.lower() == "cpu") == celsius
    assert [cpu.hertz for cpu in (stats.cpus[0], stats.cpus[-1]) if cpu] == [value * 1e6 for value in mhz]
    assert (stats.ram_used_bytes, stats.ram_total_bytes) == (ram[0] << 20, ram[1] << 20)


def test_the_tail_of_a_line_gives_what_is_in_it() -> None:
    text = shared("reference", "boards", "jetson-agx-orin", "tegrastats_busy_jp5_tail.txt").read_text()
    stats = parse_line(text.strip())
    assert stats.watts == {
        "VDD_GPU_SOC": 3.15,
        "VDD_CPU_CV": 14.312,
        "VIN_SYS_5V0": 4.968,
        "VDDQ_VDD2_1V8AO": 1.091,
    }
    assert (stats.celsius["Tboard"], stats.celsius["CV0"]) == (62, 73.625)
    assert (stats.cpus, stats.ram_used_bytes, stats.ram_total_bytes) == ((), None, None)


def test_memory_of_other_kinds_is_not_the_boards() -> None:
    assert parse_line("IRAM 0/252kB(lfb 252kB) SWAP 7/8MB RAM 331/3964MB").ram_used_bytes == 331 << 20
    assert parse_line("IRAM 0/252kB(lfb 252kB) SWAP 7/8MB").ram_total_bytes is None


def test_zones_that_are_off_have_no_temperature() -> None:
    stats = parse_line("CPU@41.437C CV0@-256C GPU@-256C iwlwifi@30C soc2@48.4C/48.5C out@-3.5C")
    assert stats.celsius == {"CPU": 41.437, "iwlwifi": 30.0, "soc2": 48.4, "out": -3.5}


def test_cpus_that_are_off_keep_their_place() -> None:
    assert parse_line("CPU [2%@345,off,off,7%@345]").cpus == (CpuLoad(0.02, 345e6), None, None, CpuLoad(0.07, 345e6))


def test_an_engine_between_rails_is_no_rail() -> None:
    line = "RAM 1/2MB (lfb 1x512kB) SWAP 0/1982MB (cached 0MB) VDD_IN 3902/3611 NVENC 716 VDD_SOC 997/941 NC 0/0"
    assert parse_line(line).watts == {"VDD_IN": 3.902, "VDD_SOC": 0.997}


@pytest.mark.parametrize("line", ["", "garbage", "VDD_IN 796mW", "VDD_IN 796mW/", "12:30/4 5/6", "\0\0"])
def test_a_line_without_figures_gives_none(line) -> None:
    assert parse_line(line).watts == {}


def test_a_recorded_output_stands_for_the_tool(tmp_path) -> None:
    root = grow(tmp_path, {"tools/tegrastats --interval 100": "\nVDD_IN 2532/2698\nVDD_IN 9/9"})
    assert tegrastats.open_sensor(root)(None).watts == {"VDD_IN": 2.532}
    with pytest.raises(NoData, match="tegrastats"):
        tegrastats.open_sensor(grow(root, {"tools/tegrastats --interval 100": "RAM 1/2MB"}))(None)
