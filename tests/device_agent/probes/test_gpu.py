"""Jetson GPU probe: load, clock, rail and temperature, and their absence."""

from __future__ import annotations

from pathlib import Path

import pytest

from device_agent.measurement.board import run_probes
from device_agent.probes import PROBES, gpu
from device_agent.probes.base import ProbeResult
from device_agent.profile.load import load_for_board
from shared.errors import NoData
from tests.boards import material
from tests.machine import grow, shared
from tests.naming import naming

HWMON, ZONES, DEVFREQ = "sys/class/hwmon/hwmon3", "sys/class/thermal", "sys/class/devfreq"
XAVIER = material.compatible("nvidia,jetson-xavier nvidia,tegra194")
TX2 = material.compatible("nvidia,p2597-0000+p3310-1000 nvidia,tegra186")
ORIN = material.compatible("nvidia,p3767-0003 nvidia,tegra234")
PLACES = {
    "JetPack 4, Nano": ("57000000.gpu", "sys/devices/57000000.gpu/load"),
    "JetPack 4, TX2": ("17000000.gp10b", "sys/devices/gpu.0/load"),
    "JetPack 5, Xavier": ("17000000.gv11b", "sys/devices/platform/17000000.gv11b/load"),
    "JetPack 5, Orin": ("17000000.ga10b", "sys/devices/platform/gpu.0/load"),
    "JetPack 6": ("17000000.gpu", "sys/devices/platform/bus@0/17000000.gpu/load"),
    "by the class": ("17000000.gpu", "sys/class/devfreq/17000000.gpu/device/load"),
}


def found(root: Path) -> ProbeResult:
    return run_probes(root, load_for_board(root), PROBES, lambda: 1.0)


def of_gpu(board: ProbeResult) -> dict[str, float]:
    return {name: one.value for name, one in board.readings.items() if name.startswith("gpu.")}


@pytest.mark.parametrize("place", PLACES)
def test_load_and_clock_wherever_a_jetpack_keeps_them(tmp_path, place) -> None:
    folder, load = PLACES[place]
    clocks = {f"{DEVFREQ}/{folder}/cur_freq": 318750000, f"{DEVFREQ}/{folder}/max_freq": 1020000000}
    others = {f"{DEVFREQ}/15340000.vic/cur_freq": 115200000, "sys/devices/platform/serial8250.gone/load": 7}
    root = grow(tmp_path, clocks | others | {load: 473})
    assert of_gpu(found(root)) == {"gpu.load_ratio": 0.473, "gpu.f_hertz": 318.75e6, "gpu.max_hertz": 1020e6}


def test_rail_and_zone_are_those_that_the_profile_says(tmp_path) -> None:
    """A TX2: VDD_GPU of 19 V and 0.152 A, and its zone."""
    files = TX2 | {
        f"{HWMON}/name": "ina3221", f"{HWMON}/in1_label": "VDD_GPU", f"{HWMON}/in1_input": 19000,
        f"{HWMON}/curr1_input": 152, f"{ZONES}/thermal_zone1/type": "GPU-therm", f"{ZONES}/thermal_zone1/temp": 41500,
        "sys/devices/gpu.0/load": 0,
    }  # fmt: skip
    board = found(grow(tmp_path, files))
    assert of_gpu(board) == {
        "gpu.load_ratio": 0.0,
        "gpu.rail_watts": pytest.approx(2.888),
        "gpu.hottest_celsius": 41.5,
    }
    assert board.readings["gpu.rail_watts"].source == "ina3221 VDD_GPU"
    assert board.absent["gpu.f_hertz"].lack == "not_present"


def test_a_rail_that_feeds_the_cpu_too_is_not_the_gpus_own(tmp_path) -> None:
    """An Orin Nano: VDD_CPU_GPU_CV is told as a rail, and not once more as the GPU's."""
    # fmt: off
    files = ORIN | {"sys/devices/platform/gpu.0/load": 999, f"{HWMON}/name": "ina3221",
                    f"{HWMON}/in2_label": "VDD_CPU_GPU_CV", f"{HWMON}/in2_input": 5000, f"{HWMON}/curr2_input": 100,
                    f"{ZONES}/thermal_zone1/type": "gpu-thermal", f"{ZONES}/thermal_zone1/temp": "#lack busy"}
    # fmt: on
    board = found(grow(tmp_path, files))
    assert of_gpu(board) == {"gpu.load_ratio": 0.999}
    assert board.absent["gpu.rail_watts"].lack == "not_present"
    assert "VDD_CPU_GPU_CV" in board.absent["gpu.rail_watts"].cause
    assert board.absent["gpu.hottest_celsius"].lack == "busy"


@pytest.mark.parametrize(
    ("board", "name", "line", "expected"),
    [
        ("jetson-nano", "tegrastats_l4t32_sudo_iram_template.txt", 0,
         {"load_ratio": 0.0, "f_hertz": 76e6, "hottest_celsius": 22.5}),
        ("jetson-orin-nano", "tegrastats_jp6_lines.txt", 0,
         {"load_ratio": 0.63, "f_hertz": 621e6, "hottest_celsius": 53.343}),
        ("jetson-agx-orin", "tegrastats_lines.txt", 0, {"load_ratio": 0.0}),
        ("jetson-agx-orin", "tegrastats_lines.txt", 1,
         {"load_ratio": 0.12, "f_hertz": 1300e6, "hottest_celsius": 47.625}),
        ("jetson-agx-orin", "tegrastats_busy_jp5_tail.txt", 0,
         {"load_ratio": 0.14, "f_hertz": 407e6, "hottest_celsius": 69.125}),
        ("jetson-agx-xavier", "tegrastats_l4t32_wifi_temp.txt", 0, {"load_ratio": 0.0, "hottest_celsius": 28.0}),
    ],
)  # fmt: skip
def test_recorded_lines_of_tegrastats(tmp_path, board, name, line, expected) -> None:
    """Where sysfs shows nothing; the clock is there for root alone, and 0 of a GPU that is off."""
    said = material.tegrastats(shared("reference", "boards", board, name).read_text().splitlines()[line])
    tree = said | (XAVIER if board == "jetson-agx-xavier" else ORIN)
    assert of_gpu(found(grow(tmp_path, tree))).items() >= {f"gpu.{key}": one for key, one in expected.items()}.items()
    missing = {"load_ratio", "f_hertz", "hottest_celsius"} - expected.keys()
    assert not {f"gpu.{key}" for key in missing} & of_gpu(found(tmp_path)).keys()


@pytest.mark.parametrize(
    ("content", "load"),
    [("55@300000000Hz", 0.55), ("0@300000000HzHz", 0.0), ("100@1000000000HzHz", 1.0), ("101@300000000Hz", None)]
    + [(content, None) for content in ("-5@300000000Hz", "55@", "@300000000Hz", "5_5@1Hz", "55@300000000Hz 1")],
)
def test_a_load_as_rockchips_kernel_writes_it(tmp_path, content, load) -> None:
    """Per cent, and the clock behind it; those of memory and NPU are not the GPU's."""
    files = {f"{DEVFREQ}/fb000000.gpu/load": content, f"{DEVFREQ}/fb000000.gpu/cur_freq": 300000000}
    files |= {f"{DEVFREQ}/dmc/load": "7@528000000Hz", f"{DEVFREQ}/fdab0000.npu/load": "9@1000000000Hz"}
    board = found(grow(tmp_path, files))
    assert of_gpu(board).get("gpu.load_ratio") == load
    assert load is not None or board.absent["gpu.load_ratio"].lack == "invalid"


@pytest.mark.parametrize(
    ("words", "load", "megahertz"),
    [
        ("GR3D_FREQ 0%@305 GR3D2_FREQ 0%@0", 0.0, 305),
        ("GR3D_FREQ 0%@0 GR3D2_FREQ 60%@1300", 0.6, 1300),
        ("GR3D_FREQ 75%@1000 GR3D2_FREQ 25%@500", 0.75, 750),
        ("GR3D_FREQ 0% GR3D2_FREQ 0%@0", 0.0, None),
    ],
)
def test_a_gpu_of_two_parts(tmp_path, words, load, megahertz) -> None:
    board = found(grow(tmp_path, ORIN | material.tegrastats(f"RAM 1/2MB (lfb 1x4MB) {words} APE 174")))
    assert board.readings["gpu.load_ratio"].value == load
    assert of_gpu(board).get("gpu.f_hertz") == (megahertz and megahertz * 1e6)


def test_a_zone_that_calls_itself_the_gpus_is(tmp_path) -> None:
    """On a board whose profile does not name it: here there is no device tree at all."""
    files = {"sys/devices/gpu.0/load": 5, f"{ZONES}/thermal_zone0/type": "GPU-thermal0"}
    board = found(grow(tmp_path, files | {f"{ZONES}/thermal_zone0/temp": 51000}))
    assert of_gpu(board) == {"gpu.load_ratio": 0.005, "gpu.hottest_celsius": 51.0}


@pytest.mark.parametrize("content", ["1001", "-1", "garbage", "#lack denied"])
def test_a_load_that_cannot_be_is_none(tmp_path, content) -> None:
    board = found(grow(tmp_path, ORIN | {"sys/devices/gpu.0/load": content}))
    assert of_gpu(board) == {}
    assert board.absent["gpu.load_ratio"].lack in ("invalid", "denied")


def test_a_board_without_a_gpu_has_no_figure_of_one(tmp_path) -> None:
    root = grow(tmp_path, {f"{DEVFREQ}/dmc/cur_freq": 800000000})
    with pytest.raises(NoData, match=naming(root / DEVFREQ)):
        gpu.read(root, load_for_board(root), 0.0)
    assert [name for name in found(root).absent if name.startswith("gpu")] == ["gpu"]
