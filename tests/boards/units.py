"""Which recordings make up which board: recorded units by name, and boards put together of parts recorded alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeAlias

from tests.boards import material
from tests.boards.material import Tree

Part: TypeAlias = Callable[[Path], Tree]
"""Reads its recordings from a board's folder."""


def recorded(name: str, turn: Callable[[str], Tree]) -> Part:
    return lambda folder: turn((folder / name).read_text())


def line(name: str, number: int, turn: Callable[[str], Tree]) -> Part:
    """One line of several that were recorded at different times."""
    return lambda folder: turn((folder / name).read_text().splitlines()[number])


def given(tree: Tree) -> Part:
    """What was not recorded, and the rest needs in order to mean anything."""
    return lambda _: tree


def tokens(*names: str) -> Part:
    """`compatible`, of boards where nobody recorded it; as their device trees say in public."""
    return given(material.compatible(" ".join(names)))


def kind(name: str) -> Part:
    """`compatible` of a recorded unit of this kind."""
    return recorded(f"dt_compatible_{name}.txt", material.compatible)


def load(name: str, number: int = 0, policies: tuple[int, ...] = (0,), zone: str = "cpu-thermal") -> Part:
    return recorded(f"load_monitor_{name}.txt", partial(material.load_line, line=number, policies=policies, zone=zone))


def topology(name: str) -> Part:
    return recorded(f"cpu_topology_{name}.txt", material.topology)


def sensors(name: str) -> Part:
    return recorded(f"lm_sensors_{name}.txt", material.lm_sensors)


def four_cores(low_mhz: int, high_mhz: int) -> Part:
    return given({"sys/devices/system/cpu/online": "0-3\n"} | material.policy(0, range(4), low_mhz, high_mhz))


def file(recording: str, name: str) -> Part:
    """A file that was recorded as it was."""
    return recorded(recording, partial(material.as_file, name))


MODEL, CPUINFO = recorded("proc_device_tree_model.txt", material.model), file("proc_cpuinfo.txt", "proc/cpuinfo")
RELEASE = "etc/nv_tegra_release"
ORIN_NANO = kind("87lq")
NANO, TX1 = tokens("nvidia,jetson-nano", "nvidia,tegra210"), tokens("nvidia,p2371-2180", "nvidia,tegra210")
PI_3BPLUS = tokens("raspberrypi,3-model-b-plus", "brcm,bcm2837")
PI_4B, PI_5 = kind("4pzj"), kind("8-NK")
PI_ZERO2W = tokens("raspberrypi,model-zero-2-w", "brcm,bcm2837")
WIFI = given({"sys/class/net/wlp2s0/phy80211/index": "0\n"})

PARTS: Mapping[str, tuple[Part, ...]] = {
    "jetson-agx-orin/4ax9": (kind("4ax9"), MODEL, CPUINFO, topology("4ax9"), sensors("4ax9"),
                             load("4ax9", 0, (0, 4, 8), "CPU-therm")),
    "jetson-agx-orin/tree": (kind("4ax9"), recorded("ina3221_hwmon_tree.tsv", material.tsv),
                             file("etc_nv_tegra_release_r39.txt", RELEASE),
                             recorded("nvpmodel_p_verbose.txt", material.power_modes),
                             given({"var/lib/nvpmodel/status": "pmode:0002 fmode:quiet\n"})),
    **{f"jetson-agx-orin/tegrastats-{number}": (
        kind("4ax9"), line("tegrastats_lines.txt", number, material.tegrastats)) for number in range(3)},
    "jetson-agx-orin/tegrastats-busy": (kind("4ax9"), line("tegrastats_busy_jp5_tail.txt", 0, material.tegrastats)),
    "jetson-agx-xavier/4ebH": (kind("4ebH"), MODEL, CPUINFO, topology("4ebH"), sensors("4ebH"),
                               load("4ebH", 0, zone="CPU-therm"),
                               recorded("nvpmodel_p_verbose.txt", material.power_modes),
                               given({"var/lib/nvpmodel/status": "pmode:0003 fmode:quiet\n"})),
    "jetson-agx-xavier/tegrastats-l4t31": (kind("4ebH"), line("tegrastats_l4t31.txt", 0, material.tegrastats)),
    "jetson-agx-xavier/tegrastats-l4t32": (
        kind("4ebH"), line("tegrastats_l4t32_wifi_temp.txt", 0, material.tegrastats)),
    "jetson-nano/3OKN": (NANO, MODEL, CPUINFO, topology("3OKN"), load("3OKN")),
    "jetson-nano/4rLX": (kind("4rLX"), MODEL, CPUINFO, topology("4rLX"), sensors("4rLX"),
                         load("4rLX", 0, zone="CPU-therm")),
    "jetson-nano/iio": (NANO, recorded("ina3221x_iio_tree.tsv", material.tsv),
                        recorded("nvpmodel_p_verbose.txt", material.power_modes),
                        given({"var/lib/nvpmodel/status": "pmode:0001 fmode:fanNull\n"})),
    "jetson-nano/tegrastats": (NANO, line("tegrastats_l4t32.txt", 0, material.tegrastats)),
    "jetson-nano/tegrastats-iram": (NANO, line("tegrastats_l4t32_sudo_iram_template.txt", 0, material.tegrastats)),
    "jetson-orin-nano/4vy7": (kind("4vy7"), MODEL, CPUINFO, topology("4vy7"), sensors("4vy7"),
                              load("4vy7", 0, (0, 4), "CPU-therm")),
    "jetson-orin-nano/4Ebd": (kind("4Ebd"), MODEL, CPUINFO, topology("4Ebd"), sensors("4Ebd"),
                              load("4Ebd", 0, (0, 4), "CPU-therm")),
    "jetson-orin-nano/87lq": (kind("87lq"), MODEL, CPUINFO, topology("87lq"), sensors("87lq"), load("87lq", 0, (0, 4))),
    "jetson-orin-nano/tree": (ORIN_NANO, recorded("ina3221_hwmon_tree.tsv", material.tsv),
                              recorded("soctherm_oc_hwmon.tsv", material.tsv),
                              recorded("thermal_zone_eagain_observed.txt", material.observed_zones),
                              recorded("nvpmodel_conf_modes_super.txt", material.power_modes),
                              file("var_lib_nvpmodel_status.txt", "var/lib/nvpmodel/status"),
                              file("etc_nv_tegra_release.txt", RELEASE)),
    "jetson-orin-nano/modes-nonsuper": (kind("4vy7"),
                                        recorded("nvpmodel_conf_modes_nonsuper.txt", material.power_modes),
                                        given({"var/lib/nvpmodel/status": "pmode:0001 fmode:fanNull\n"})),
    "jetson-orin-nano/modes-asked": (ORIN_NANO, file("nvpmodel_q.txt", "tools/nvpmodel -q")),
    **{f"jetson-orin-nano/tegrastats-{number}": (
        ORIN_NANO, line("tegrastats_jp6_lines.txt", number, material.tegrastats)) for number in range(5)},
    "jetson-tx1/tegrastats": (TX1, line("tegrastats_sudo.txt", 0, material.tegrastats)),
    "jetson-xavier-nx/3YWp": (kind("3YWp"), MODEL, topology("3YWp"), sensors("3YWp"), load("3YWp"),
                              file("etc_nv_tegra_release_r35.txt", RELEASE),
                              recorded("nvpmodel_p_verbose_grep.txt", material.power_modes),
                              given({"var/lib/nvpmodel/status": "pmode:0002 fmode:quiet\n"})),
    "rpi-3bplus/1iH0": (PI_3BPLUS, MODEL, four_cores(600, 1400), load("1iH0", 1),
                        recorded("get_throttled_bits_1iH0.txt", material.throttled_picture)),
    "rpi-3bplus/1iH0-warm": (PI_3BPLUS, MODEL, four_cores(600, 1400), load("1iH0", 0)),
    "rpi-4b/3EgS": (PI_4B, MODEL, four_cores(600, 1500), load("3EgS")),
    "rpi-4b/3L37": (PI_4B, MODEL, CPUINFO, topology("3L37"), sensors("3L37"), load("3L37")),
    "rpi-4b/4pzj": (kind("4pzj"), MODEL, CPUINFO, topology("4pzj"), sensors("4pzj"), load("4pzj")),
    "rpi-4b/capped": (PI_4B, four_cores(600, 1500), given(material.clocks({0: 1500})),
                      recorded("thermal_capped_snapshot.txt", material.firmware_answers)),
    "rpi-4b/overclock": (PI_4B, recorded("measure_clock_arm_overclock.txt", material.firmware_answers),
                         recorded("measure_temp.txt", material.firmware_answers),
                         recorded("lm_sensors.txt", material.lm_sensors)),
    "rpi-4b/hidden-clock": (PI_4B, four_cores(600, 1500), given(material.clocks({0: 600})),
                            line("measure_clock_vs_scaling_cur_freq.txt", 1,
                                 lambda text: material.firmware_answers(text.split("\t")[1]))),
    **{f"rpi-4b/throttled-{number}": (
        PI_4B, line("get_throttled_values.txt", number, material.firmware_answers)) for number in range(6)},
    "rpi-5/8-NK": (kind("8-NK"), MODEL, CPUINFO, topology("8-NK"), sensors("8-NK"), load("8-NK")),
    "rpi-5/8acvqG": (kind("8acvqG"), MODEL, CPUINFO, topology("8acvqG"), sensors("8acvqG"), load("8acvqG")),
    "rpi-5/busy": (PI_5, file("pmic_read_adc_4cores_busy.txt", "tools/vcgencmd pmic_read_adc"),
                   recorded("measure_clock_arm.txt", material.firmware_answers),
                   file("sysfs_get_throttled.txt", "sys/devices/platform/soc/soc:firmware/get_throttled")),
    "rpi-5/early-firmware": (PI_5, file("pmic_read_adc_early_firmware_head.txt", "tools/vcgencmd pmic_read_adc")),
    "rpi-zero2w/3DeL": (PI_ZERO2W, MODEL, CPUINFO, four_cores(600, 1200), sensors("3DeL"), load("3DeL")),
    "rpi-zero2w/3E85": (PI_ZERO2W, MODEL, CPUINFO, four_cores(600, 1000), load("3E85")),
    "x86-generic/cpufreq": (recorded("cpufreq_tree.tsv", material.tsv),
                            given({"sys/devices/system/cpu/online": "0-1\n"})),
    "x86-generic/cpuinfo": (file("proc_cpuinfo_i7-8650U.txt", "proc/cpuinfo"),),
    "x86-generic/battery": (recorded("power_supply_bat0_tree.tsv", material.tsv),),
    "x86-generic/powercap": (recorded("powercap_tree.tsv", material.tsv),),
    "x86-generic/thermal": (recorded("thermal_tree.tsv", material.tsv),),
    "x86-generic/pressure": (file("proc_pressure_memory.txt", "proc/pressure/memory"),
                             given({"proc/meminfo": "MemTotal: 16000000 kB\nMemAvailable: 9000000 kB\n"})),
    "net/counters": (file("proc_net_dev.txt", "proc/net/dev"),),
    "net/wireless": (file("proc_net_wireless.txt", "proc/net/wireless"),
                     given({"sys/class/net/wlan0/phy80211/index": "0\n"})),
    "wifi/connected": (WIFI, file("iw_dev_link_vht80.txt", "tools/iw dev wlp2s0 link"),
                       file("iw_station_dump_ap_vht.txt", "tools/iw dev wlp2s0 station dump")),
    "wifi/silent-driver": (WIFI, file("iw_dev_link_vht80.txt", "tools/iw dev wlp2s0 link"),
                           file("iw_station_dump_empty_broadcom.txt", "tools/iw dev wlp2s0 station dump")),
    "wifi/not-connected": (WIFI, file("iw_dev_link_not_connected.txt", "tools/iw dev wlp2s0 link")),
}  # fmt: skip
"""By `folder/unit`."""

NO_BOARDS: Mapping[str, str] = {"meters": "answers of network meters, read over HTTP: see the tests of http_meter"}
"""Recorded folders that hold no files of a board, and where they are read instead."""


def build(boards: Path, unit: str, root: Path) -> Path:
    """Write the files of a unit below `root`, from the folder of recorded boards."""
    tree: Tree = {}
    for part in PARTS[unit]:
        tree |= part(boards / unit.partition("/")[0])
    return material.write(tree, root)
