"""Boards of public reports, read by `device-agent probe`; each file holds the board's tree and the correct figures."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import msgspec
import pytest

from device_agent.commands import doctor, probe
from device_agent.commands.probe import ProbeOutput
from device_agent.measurement.board import run_probes
from device_agent.probes import PROBES
from device_agent.probes.power.source import TOTAL_WATTS
from device_agent.probes.thermal import HOTTEST_CELSIUS
from device_agent.profile.load import load_for_board
from shared.protocol.units import format_figure
from tests.machine import shared

FOLDER = Path(__file__).parents[1] / "fixtures" / "reported_boards"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
LACKS = {"not_present", "denied", "busy", "invalid"}
HIDDEN_RAPL = "x86-rapl-hidden-by-container"


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A reported board and what is correct.

    Attributes:
        files: Content by path below the root.
        links: Target by path of a symbolic link.
        absent: Cause by figure; the words before a colon are the permitted lacks, any lack where none of them is one.
        not_measured: Figures that must not have the quality `measured`.
    """

    source: str
    note: str = ""
    files: dict[str, str]
    links: dict[str, str] = {}
    readings: dict[str, float] = {}
    absent: dict[str, str] = {}
    facts: dict[str, str] = {}
    not_measured: list[str] = []
    board: str = ""


def load_case(name: str) -> Case:
    return msgspec.json.decode((FOLDER / f"{name}.json").read_bytes(), type=Case)


def build_tree(case: Case, root: Path) -> None:
    for name, content in case.files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    for name, target in case.links.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(target)


@pytest.mark.parametrize("name", NAMES)
def test_a_reported_board_is_read_correctly(name, tmp_path, capsys) -> None:
    case = load_case(name)
    build_tree(case, tmp_path)
    parser = argparse.ArgumentParser()
    probe.add(parser)
    assert probe.run(parser.parse_args(["--root", str(tmp_path), "--format", "json"])) == 0
    found = msgspec.json.decode(capsys.readouterr().out, type=ProbeOutput)
    assert case.board in ("", found.board)
    values = {key: found.readings[key].value for key in case.readings if key in found.readings}
    assert values.keys() == case.readings.keys(), {key: found.absent.get(key) for key in case.readings.keys() - values}
    wrong = {key: value for key, value in values.items() if not math.isclose(value, case.readings[key], abs_tol=1e-9)}
    assert wrong == {}
    for key, cause in case.absent.items():
        assert key not in found.readings
        lacks = LACKS & set(cause.partition(":")[0].split("/")) or LACKS
        assert found.absent[key].lack in lacks, found.absent[key]
        assert found.absent[key].cause
    assert case.facts.items() <= found.facts.items()
    assert [
        key for key in case.not_measured if key in found.readings and found.readings[key].quality == "measured"
    ] == []
    if name == HIDDEN_RAPL:
        assert "/sys/devices/virtual/powercap" in found.absent["power.total_watts"].cause


@pytest.mark.parametrize("name", NAMES)
def test_doctor_gives_the_quality_that_probe_gives(name, tmp_path) -> None:
    """Of every figure whose source serves: a clock that is announced is not measured because doctor asks it alone."""
    build_tree(load_case(name), tmp_path)
    found = run_probes(tmp_path, load_for_board(tmp_path), PROBES, lambda: 1.0)
    findings = [(check.name.partition(":")[0], check.finding) for check in doctor.run_checks(None, tmp_path)]
    for quantity, key in (("cpu clock", "cpu.f_hertz"), ("power", TOTAL_WATTS), ("thermal", HOTTEST_CELSIUS)):
        if reading := found.readings.get(key):
            shown = f"{format_figure(key, reading.value)}, {reading.quality}"
            assert shown in [finding for name, finding in findings if name == quantity]


def test_every_recorded_case_is_one_of_these() -> None:
    folder = shared("cases", "boards")
    for path in folder.iterdir():
        tree = path / "root"
        files = {str(one.relative_to(tree)): one.read_bytes().decode() for one in tree.rglob("*") if one.is_file()}
        assert load_case(path.name).files == files
