"""Which wheels which system is given: every board that is recorded, every row, and what nobody has heard of."""

from __future__ import annotations

import platform
import re
import sys
import tomllib
from importlib.metadata import version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.runtime.support import table as support
from shared.runtime.support.table import (
    LEAST_MEMORY_MB,
    MIB,
    System,
    choose,
    find_row,
    read_l4t,
    read_missing_feature,
    read_table,
    read_wheels,
    require_memory,
    this_system,
)
from tests.machine import shared
from tests.naming import naming

ROOT = Path(__file__).parents[4]
PURPOSES = ("train", "infer", "server")
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")


@pytest.fixture(scope="module")
def table():
    return read_table()


@pytest.fixture(scope="module")
def wheels():
    return read_wheels()


def load_script(name: str):
    """Return a script of deploy/support as a module."""
    spec = spec_from_file_location(name, ROOT / "deploy/support" / f"{name}.py")
    found = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def torch_of(choice) -> str:
    return next(one.version for one in choice.wheels if one.name == "torch")


@pytest.mark.parametrize(
    ("python", "torch"), [("3.10", "2.9.1"), ("3.11", "2.5.1"), ("3.12", "2.9.1"), ("3.13", "2.9.1")]
)
def test_a_board_of_armv8_0_is_given_what_does_not_die_there(table, wheels, python, torch):
    """Seen on an emulated Cortex-A72: torch 2.10.0 dies of SIGILL when it is imported, these train."""
    choice = choose(table, wheels, System("aarch64", python, lacks="atomics"), "train")
    assert torch_of(choice) == torch
    assert next(one.version for one in choice.wheels if one.name == "onnxruntime") == "1.20.1"


def test_a_python_for_which_nothing_runs_without_atomics_is_refused(table, wheels):
    with pytest.raises(ConfigError, match="Raspberry Pi OS 13"):
        choose(table, wheels, System("aarch64", "3.14", lacks="atomics"), "train")


@pytest.mark.parametrize("python", PYTHONS)
def test_a_64_bit_arm_board_is_given_the_last_torch_without_cuda(table, wheels, python):
    """From 2.11 on the wheel that plain pip takes there wants gigabytes of CUDA."""
    choice = choose(table, wheels, System("aarch64", python), "train")
    assert [*map(int, torch_of(choice).split(".")[:2])] < [2, 11]
    assert choice.wheels[-1].name == "torch"
    assert choice.bytes < 260e6
    assert not any(one.name.startswith(("nvidia", "cuda", "triton")) for one in choice.wheels)


@pytest.mark.parametrize("python", ["3.10", "3.11"])
def test_a_jetson_with_jetpack_6_is_given_what_nvidia_builds_for_its_python(table, wheels, python):
    """Also where the agent runs on another Python than the system's: what trains need not."""
    choice = choose(table, wheels, System("aarch64", python, 36), "train")
    files = {one.name: one.file for one in choice.wheels}
    assert files["torch"] == "torch-2.8.0-cp310-cp310-linux_aarch64.whl"
    assert files["onnxruntime-gpu"] == "onnxruntime_gpu-1.24.0-cp310-cp310-linux_aarch64.whl"
    assert files["numpy"].startswith("numpy-1.26"), "what NVIDIA builds may not load with numpy 2"
    assert choice.row.index.startswith("https://pypi.jetson-ai-lab.io/jp6/cu126")
    assert choice.interpreter == "/usr/bin/python3.10"
    assert choice.row.gpu


@pytest.mark.parametrize("l4t", [38, 39])
def test_a_jetson_with_jetpack_7_is_given_cuda_13(table, wheels, l4t):
    """Known: torch 2.11 with CUDA 13.0 trains on a GPU with Python 3.12."""
    choice = choose(table, wheels, System("aarch64", "3.12", l4t), "train")
    names = {one.name: one.version for one in choice.wheels}
    assert names["torch"] == "2.11.0"
    assert any(name.startswith(("nvidia-cublas", "nvidia-cudnn")) for name in names)
    assert "onnxruntime-gpu" in names
    assert choice.row.gpu


@pytest.mark.parametrize("python", PYTHONS)
def test_a_pc_is_given_a_torch_for_the_cpu(table, wheels, python):
    choice = choose(table, wheels, System("x86_64", python), "train")
    assert torch_of(choice).endswith("+cpu")
    assert choice.row.index == "https://download.pytorch.org/whl/cpu"


@pytest.mark.parametrize("machine", ["armv6l", "armv7l", "armv8l", "i686"])
@pytest.mark.parametrize("purpose", PURPOSES)
def test_32_bits_are_refused_with_the_reason(table, wheels, machine, purpose):
    system = System(machine, "3.11")
    with pytest.raises(ConfigError, match=naming("64-bit", find_row(table, system).refused)):
        choose(table, wheels, system, purpose)


@pytest.mark.parametrize(("l4t", "python", "why"), [(32, "3.6", "3.6.*container"), (35, "3.8", "2.31.*container")])
def test_jetsons_whose_system_is_too_old_are_refused_with_the_reason_and_a_way(table, wheels, l4t, python, why):
    with pytest.raises(ConfigError, match=why):
        choose(table, wheels, System("aarch64", python, l4t), "train")


def test_a_gateway_needs_a_newer_python_than_the_agent(table, wheels):
    with pytest.raises(ConfigError, match=naming("Python 3.11")):
        choose(table, wheels, System("x86_64", "3.10"), "server")


@pytest.mark.parametrize(
    "system", [System("riscv64", "3.11"), System("x86_64", "3.9"), System("aarch64", "3.11", 99), System("", "")]
)
def test_what_nobody_has_tried_is_refused_with_a_way_out(table, wheels, system):
    with pytest.raises(ConfigError, match=naming(system.machine, system.python)):
        choose(table, wheels, system, "train")


OLD = {"jetson-nano", "jetson-tx1", "rpi-3bplus", "rpi-4b", "rpi-zero2w"}
"""Recorded boards with Cortex-A53, A57 or A72."""


def test_every_recorded_board_has_its_row(table, tmp_path):
    """By the facts that its own files tell."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "etc").mkdir()
    old = set()
    for cpu in sorted(shared("reference", "boards").glob("*/proc_cpuinfo.txt")):
        text = cpu.read_text(errors="replace")
        if "CPU implementer" not in text:
            continue
        (tmp_path / "proc/cpuinfo").write_text(text)
        lacks = read_missing_feature(tmp_path)
        old |= {cpu.parent.name} if lacks else set()
        for release in cpu.parent.glob("etc_nv_tegra_release*.txt"):
            (tmp_path / "etc/nv_tegra_release").write_text(release.read_text())
            python = {36: "3.10"}.get(read_l4t(tmp_path), "3.12")
            assert "Jetson" in find_row(table, System("aarch64", python, read_l4t(tmp_path), lacks)).systems
        row = find_row(table, System("aarch64", "3.11", lacks=lacks))
        assert row.wheels == ("aarch64-3.11-armv8.0" if lacks else "aarch64-3.11")
    assert old <= OLD
    assert old & {"rpi-4b", "jetson-nano"}


@pytest.mark.parametrize(
    ("text", "major"),
    [
        ("# R36 (release), REVISION: 4.0, GCID: 37537400, BOARD: generic\n", 36),
        ("# R35 (release), REVISION: 4.1", 35),
        ("Raspbian", 0),
        ("", 0),
    ],
)
def test_a_jetson_tells_its_system(tmp_path, text, major):
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nv_tegra_release").write_text(text)
    assert read_l4t(tmp_path) == major
    assert read_l4t(tmp_path / "nowhere") == 0


def test_this_system_has_a_row_or_a_reason(table):
    assert this_system().machine in (platform.machine(), "armv8l")
    if this_system() in (System("x86_64", "3.11"), System("aarch64", "3.11")):
        assert find_row(table, this_system()).wheels


def test_a_32_bit_python_on_a_64_bit_kernel_is_32_bits(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(support, "IS_64_BIT", False)
    assert this_system().machine == "armv8l"


def test_every_row_names_a_set_or_says_why_not(table, wheels):
    for row in table.row:
        assert bool(row.wheels) != bool(row.refused), row.systems
        if row.wheels:
            machine, python = row.wheels.split("-")[:2]
            assert machine in row.machine
            assert (row.worker or row.python) == python
            assert row.wheels in wheels.sets
    assert {row.wheels for row in table.row} - {""} == set(wheels.sets)


def test_every_set_is_whole_and_of_its_platform(wheels):
    assert len({one.file for one in wheels.wheels}) == len(wheels.wheels)
    for name, one in wheels.sets.items():
        machine, python = name.split("-")[:2]
        assert set(one.infer) <= set(one.train)
        for purpose in PURPOSES:
            taken = wheels.take(name, purpose)
            assert len(taken) == len(getattr(one, purpose)) == len({wheel.name for wheel in taken})
            assert "torch" not in {wheel.name for wheel in taken} or purpose != "infer"
            for wheel in taken:
                tag = wheel.file.removesuffix(".whl").split("-")[2:]
                assert tag[-1] == "any" or tag[-1].endswith(machine), wheel.file
                interpreter = f"cp{python.replace('.', '')}"
                is_any = tag[-1] == "any" or "py3" in tag[0]
                assert is_any or interpreter in tag[0] or "abi3" in tag[1], wheel.file
                assert wheel.bytes <= wheel.unpacked * 2


def pinned(name: str) -> dict[str, str]:
    """Return the versions of a file of constraints."""
    lines = (ROOT / name).read_text().splitlines()
    pairs = (line.lower().split("==") for line in lines if "==" in line[:60])
    return {re.sub(r"[-_.]+", "-", one): told for one, told in pairs}


FREE = {"setuptools", "sympy"}
"""Older releases of torch want older ones than are pinned."""


def test_versions_are_those_that_the_tests_run_with(wheels):
    """But for what the sets say otherwise; a pin that is renewed wants `python deploy/support/lock.py`."""
    other = load_script("lock").OTHER
    stale = set[str]()
    for name, one in wheels.sets.items():
        pins = pinned("constraints-3.10.txt" if "-3.10" in name else "constraints.txt") | other[name]
        for file in {*one.train, *one.infer, *one.server}:
            [wheel] = [found for found in wheels.wheels if found.file == file]
            known = pins.get(wheel.name, wheel.version)
            if wheel.version != known and wheel.name not in FREE:
                stale.add(f"{name}: {file} and not {known}")
    assert not stale


def test_all_that_the_extras_name_is_brought(wheels):
    """Of pyproject.toml, but for the embedded broker and what the packages bring along themselves."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {extra: {re.split(r"[><=]", line)[0] for line in lines} for extra, lines in extras.items()}
    for one in wheels.sets:
        brought = {
            purpose: {wheel.name.removesuffix("-gpu") for wheel in wheels.take(one, purpose)} for purpose in PURPOSES
        }
        assert names["device"] <= brought["train"]
        assert names["infer"] <= brought["infer"]
        if "-3.10" not in one:
            assert names["server"] - {"amqtt", "rich", "segno"} <= brought["server"]
            assert names["release"] <= brought["server"]


@pytest.mark.parametrize("purpose", PURPOSES)
def test_too_little_memory_is_refused_before_anything_comes(purpose):
    least = LEAST_MEMORY_MB[purpose] * MIB
    require_memory(purpose, least)
    with pytest.raises(ConfigError, match="--anyway"):
        require_memory(purpose, least - 1)


def test_a_board_of_512_mb_serves_and_does_not_train():
    """A Zero 2 W tells 416 MB to 480 MB, by what its GPU is given."""
    require_memory("infer", 416 * MIB)
    with pytest.raises(ConfigError, match="setup infer"):
        require_memory("train", 480 * MIB)


def test_the_set_is_the_version_that_runs_here(wheels):
    """So that the names of the file are those of the index, and not of another naming."""
    for wheel in wheels.take("x86_64-3.11", "train"):
        if wheel.name in ("numpy", "safetensors"):
            assert version(wheel.name) == wheel.version
