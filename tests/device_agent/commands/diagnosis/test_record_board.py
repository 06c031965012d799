"""A recorded board replays: the same figures, the same lacks, and nobody's name."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import msgspec
import pytest

from device_agent.commands.diagnosis import record_board
from device_agent.commands.diagnosis.record_board import Expected, make_expected, record, save_expected
from device_agent.hardware import tools
from device_agent.measurement.board import run_probes
from device_agent.probes import PROBES
from device_agent.profile.load import load_for_board
from shared.errors import ConfigError, NoData

BOARDS = Path(__file__).parents[3] / "fixtures" / "boards"
LIVE = Path("/")


def made_of(root: Path) -> Expected:
    profile = load_for_board(root, "auto")
    return make_expected(profile, run_probes(root, profile, PROBES, lambda: 1.0))


@pytest.fixture
def board(tmp_path) -> Path:
    """A board whose files name its owner everywhere."""
    root = shutil.copytree(BOARDS / "raspberry-pi-4b-hot" / "root", tmp_path / "board")
    (root / "proc/cpuinfo").write_text(
        "processor\t: 0\nFeatures\t: fp asimd crc32\nCPU implementer\t: 0x41\nSerial\t\t: 100000001234abcd\n"
    )
    for name in ("link", "station dump"):
        (root / f"tools/iw dev wlan0 {name}").write_text(
            "Connected to e4:c0:e2:db:1d:45 (on wlan0)\n\tSSID: Attic\n\tsignal: -58 dBm\n\ttx bitrate: 200.0 MBit/s\n"
        )
    net = (root / "proc/net/dev").read_text() + "enx00112233aabb: 5 0 0 0 0 0 0 0 6 0 0 0 0 0 0 0\n"
    (root / "proc/net/dev").write_text(net)
    (root / "sys/class/net/enx00112233aabb").mkdir()
    (root / "sys/class/net/enx00112233aabb/speed").write_text("100\n")
    return root


@pytest.mark.parametrize("name", sorted(path.name for path in BOARDS.iterdir()))
def test_a_recording_gives_what_the_board_gave(name, tmp_path) -> None:
    """Every figure, every lack and every fact, those of files that refused included; and again when recorded again."""
    root = BOARDS / name / record_board.ROOT
    record(root, tmp_path / "once")
    record(tmp_path / "once" / record_board.ROOT, tmp_path / "twice")
    for copy in ("once", "twice"):
        assert made_of(tmp_path / copy / record_board.ROOT) == made_of(root)


def add_chip(root: Path, bus: int, address: str, number: int, *, has_bus: bool) -> None:
    """Add an INA226 as the kernel shows it: one folder of the device, with links to it from the class and the bus."""
    device = root / f"sys/devices/platform/soc/fe804000.i2c/i2c-{bus}/{bus}-{address}"
    chip = device / f"hwmon/hwmon{number}"
    chip.mkdir(parents=True)
    for name, content in (("in1", 5000), ("curr1", 100 * number), ("power1", 500_000 * number)):
        (chip / f"{name}_input").write_text(f"{content}\n")
    (chip / "name").write_text("ina226\n")
    (device / "name").write_text("ina226\n")
    links = {"sys/class/hwmon": chip} | ({"sys/bus/i2c/devices": device} if has_bus else {})
    for folder, target in links.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / target.name).symlink_to(os.path.relpath(target, root / folder))


@pytest.mark.parametrize("has_bus", [True, False])
def test_chips_of_one_kind_have_the_same_names_live_and_recorded(tmp_path, has_bus) -> None:
    """By their address, which a copy without links keeps also where a container hides the folder of the bus."""
    live = tmp_path / "live"
    add_chip(live, 1, "0040", 2, has_bus=has_bus)
    add_chip(live, 1, "0041", 10, has_bus=has_bus)
    record(live, tmp_path / "copy")
    here, there = made_of(live), made_of(tmp_path / "copy" / record_board.ROOT)
    assert here == there
    assert here.readings["power.ina226-1-0040_watts"] == 1.0
    assert here.readings["power.ina226-1-0041_watts"] == 5.0


def test_a_recording_of_this_machine_gives_what_this_machine_gave(tmp_path) -> None:
    """What does not change from one moment to the next is the same; lacks are of the same kind."""
    before = made_of(LIVE)
    record(LIVE, tmp_path / "copy")
    copy = made_of(tmp_path / "copy" / record_board.ROOT)
    steady = [name for name in before.readings if name.endswith(("_count", "total_bytes", "_max_hertz", "limit_bytes"))]
    steady = [name for name in steady if not name.startswith("disk.")]
    assert "memory.total_bytes" in steady
    assert {name: copy.readings[name] for name in steady} == {name: before.readings[name] for name in steady}
    assert copy.board == before.board
    here = {name: lack for name, lack in before.absent.items() if not name.startswith("disk")}
    assert {name: lack for name, lack in copy.absent.items() if name != "disk"} == here
    facts = ("kernel", "governor", "mode", "model", "l4t")
    assert {name: copy.facts.get(name) for name in facts} == {name: before.facts.get(name) for name in facts}


def test_nobody_is_named(board, tmp_path) -> None:
    """Serial number, MAC addresses, the network's name: neither in a file nor in the name of one."""
    record(board, tmp_path / "copy")
    files = [path for path in (tmp_path / "copy").rglob("*") if path.is_file()]
    all_text = "\n".join([*map(str, files), *(path.read_text() for path in files)])
    for secret in ("100000001234abcd", "e4:c0:e2", "Attic", "00112233aabb", "db:1d:45"):
        assert secret not in all_text
    assert "CPU implementer\t: 0x41" in all_text
    figures = made_of(tmp_path / "copy" / record_board.ROOT).readings
    assert figures["wifi.wlan0_signal_dbm"] == -58
    assert figures["net.enx000000000000_sent_bytes"] == 6
    assert figures["net.enx000000000000_speed_bits_per_s"] == 100e6


def test_what_refused_is_recorded_as_refusing(board, tmp_path) -> None:
    """EAGAIN through an empty pipe that somebody holds open, as a powered-down sensor answers it."""
    zone = board / "sys/class/thermal/thermal_zone0/temp"
    zone.unlink()
    os.mkfifo(zone)
    writer = os.open(zone, os.O_RDWR | os.O_NONBLOCK)
    try:
        summary = record(board, tmp_path / "copy")
    finally:
        os.close(writer)
    name = "sys/class/thermal/thermal_zone0/temp"
    assert summary.lacks[name] == "busy"
    assert (tmp_path / "copy" / record_board.ROOT / name).read_text() == "#lack busy\n"
    assert made_of(tmp_path / "copy" / record_board.ROOT).absent["thermal.cpu-thermal_celsius"] == "busy"


def test_a_recorded_tool_that_refused_refuses_again_and_a_mark_stands_alone(tmp_path) -> None:
    """`#lack of interest` is a text like any other."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/nvpmodel -q").write_text("#lack denied\n")
    (tmp_path / "tools/iw list").write_text("#lack of interest\n")
    with pytest.raises(NoData) as refused:
        tools.run_tool(tmp_path, ["nvpmodel", "-q"])
    assert refused.value.lack == "denied"
    assert tools.run_tool(tmp_path, ["iw", "list"]) == "#lack of interest\n"


def test_what_is_too_large_is_left_out_and_said_so(board, tmp_path) -> None:
    (board / "proc/meminfo").write_text("x" * (record_board.MAX_FILE_BYTES + 1))
    summary = record(board, tmp_path / "copy")
    assert summary.left_out == ("proc/meminfo",)
    assert not (tmp_path / "copy" / record_board.ROOT / "proc/meminfo").exists()
    assert summary.size_bytes < record_board.MAX_FILE_BYTES


def test_a_folder_that_holds_something_is_not_written_into(board, tmp_path) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    (folder / "precious").touch()
    with pytest.raises(ConfigError, match=re.escape(str(folder))):
        record(board, folder)
    assert [path.name for path in folder.iterdir()] == ["precious"]


def test_expectations_are_a_fixtures_own(tmp_path) -> None:
    """Written and read again as the tests of the fixtures read them."""
    told = made_of(BOARDS / "laptop-battery" / record_board.ROOT)
    save_expected(tmp_path, told)
    assert msgspec.json.decode((tmp_path / record_board.EXPECTED).read_bytes(), type=Expected) == told
