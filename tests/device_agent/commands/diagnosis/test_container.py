"""What a container hides is named, each with the line that shows it; Docker masks more than most expect."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from device_agent.commands.diagnosis.container import examine_container
from tests.machine import grow

ROOT = Path(__file__).parents[4]
SEEN = {
    ".dockerenv": "",
    "sys/firmware/devicetree/base/model": "Raspberry Pi 4 Model B Rev 1.4",
    "sys/class/powercap/intel-rapl:0/energy_uj": "1",
    "sys/devices/system/cpu/cpu0/online": "1",
    "dev/vcio": "",
}


def board(folder: Path, *without: str, more: dict[str, str] | None = None) -> Path:
    """Return a container's root that shows everything but what begins with some names."""
    files = {path: text for path, text in SEEN.items() if not path.startswith(without or ("-",))}
    root = grow(folder, files | (more or {}))
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc/device-tree").symlink_to("../sys/firmware/devicetree/base")
    return root


def test_outside_of_a_container_nothing_is_said(tmp_path):
    assert list(examine_container(board(tmp_path, ".dockerenv"))) == []


@pytest.mark.parametrize("mark", [".dockerenv", "run/.containerenv"])
def test_a_container_that_shows_the_board_is_well(tmp_path, mark):
    [found] = examine_container(board(tmp_path, ".dockerenv", more={mark: ""}))
    assert (found.state, found.name) == ("ok", "container")


@pytest.mark.parametrize(
    ("hidden", "more", "finding", "remedy"),
    [
        ("sys/firmware", {}, "sys/firmware", "systempaths=unconfined"),
        ("sys/class/powercap", {"sys/class/powercap/intel-rapl:0/name": "x"}, "sys/class/powercap", "systempaths"),
        ("sys/devices", {}, "sys/devices/system/cpu", "/sys:/sys:ro"),
        ("dev/vcio", {}, "vcgencmd", "/dev/vcio"),
    ],
)
def test_what_is_hidden_is_named_with_its_line(tmp_path, hidden, more, finding, remedy):
    found = [check for check in examine_container(board(tmp_path, hidden, more=more)) if check.state == "warn"]
    assert any(finding in check.finding and remedy in check.remedy for check in found), found


def test_the_compose_file_of_the_agent_shows_all_of_it():
    agent = yaml.safe_load((ROOT / "deploy/container/agent.yml").read_text())["services"]["agent"]
    assert "systempaths=unconfined" in agent["security_opt"]
    assert "/sys:/sys:ro" in agent["volumes"]
    assert "video" in agent["group_add"]
    pi = yaml.safe_load((ROOT / "deploy/container/raspberry-pi.yml").read_text())["services"]["agent"]
    assert "/dev/vcio" in pi["devices"]
