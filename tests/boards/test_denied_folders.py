"""Folders that may not be searched, as systemd's InaccessiblePaths makes them: each costs its own figures only."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from device_agent.commands import doctor, probe
from device_agent.config import BoardConfig
from device_agent.measurement.board import open_board
from device_agent.measurement.calibration_file import MeasurementSettings
from device_agent.measurement.link_meter import LinkMeter
from tests.boards.mutate import PARTIAL
from tests.boards.test_fixtures import BOARDS
from tests.machine import as_nobody, command, open_to_all

ORIN, LAPTOP = "jetson-orin-nx", "laptop-battery"
FOLDERS = [
    (name, str(folder.relative_to(BOARDS / name / "root")))
    for name in (ORIN, LAPTOP)
    for folder in sorted((BOARDS / name / "root").rglob("*"))
    if folder.is_dir()
]
CLOSED, TO_ALL = 0o000, 0o777


@pytest.fixture
def place() -> Iterator[Path]:
    """Give a folder that every user may write."""
    with open_to_all() as folder:
        folder.chmod(TO_ALL)
        yield folder
        for one in folder.rglob("*"):
            if one.is_dir():
                one.chmod(TO_ALL)


@pytest.fixture
def shown(capsys) -> Callable[..., dict[str, Any]]:
    """Return what `probe` prints of a board, as JSON."""

    def run(root: Path) -> dict[str, Any]:
        capsys.readouterr()
        assert command(probe, "--root", root, "--format", "json") == 0
        return msgspec.json.decode(capsys.readouterr().out)

    return run


def values(said: dict[str, Any]) -> dict[str, float]:
    return {name: one["value"] for name, one in said["readings"].items()}


@pytest.mark.parametrize(("name", "folder"), FOLDERS)
def test_a_closed_folder_ends_no_command_and_its_figures_are_denied(name, folder, place, shown) -> None:
    """`probe`, `doctor`, `--record`, and what the agent itself opens and reports."""
    root = shutil.copytree(BOARDS / name / "root", place / "root")
    whole = shown(root)
    (root / folder).chmod(CLOSED)
    with as_nobody():
        said = shown(root)
        assert command(doctor, "--root", root) in (0, 1)
        assert command(probe, "--root", root, "--record", place / "copy") == 0
        board = open_board(MeasurementSettings(board=BoardConfig(root=str(root), profile=whole["board"])))
        assert board.report("device", LinkMeter(), place).readings
    part = {key for key, one in said["readings"].items() if PARTIAL.search(one["source"])}
    assert {key: one for key, one in values(said).items() if key not in part}.items() <= values(whole).items()
    probes = {key.partition(".")[0] for key in values(whole).keys() - values(said).keys()}
    if probes and said["board"] == whole["board"]:
        lacks = {one["lack"] for key, one in said["absent"].items() if key.partition(".")[0] in probes}
        assert "denied" in lacks


def test_a_recording_of_a_closed_folder_gives_the_same_lacks(place, shown) -> None:
    root = shutil.copytree(BOARDS / ORIN / "root", place / "root")
    (root / "sys/class/thermal").chmod(CLOSED)
    with as_nobody():
        here = shown(root)
        assert command(probe, "--root", root, "--record", place / "copy") == 0
    there = shown(place / "copy")
    assert here["absent"]["thermal"]["lack"] == there["absent"]["thermal"]["lack"] == "denied"
    assert here["readings"].keys() == there["readings"].keys()
