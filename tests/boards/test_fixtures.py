"""Boards of our own making, and whatever others contribute: a folder is all a new one takes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from device_agent.commands.diagnosis import record_board
from shared.runtime.diagnosis.redaction import redact
from tests.boards.compare import Expected, compare

BOARDS = Path(__file__).parent.parent / "fixtures" / "boards"
FOLDERS = sorted(path.name for path in BOARDS.iterdir())


def test_the_folders_are_found() -> None:
    """So that the test below does not pass for want of boards."""
    assert {"jetson-orin-nx", "raspberry-pi-4b-hot", "laptop-battery"} <= set(FOLDERS)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_gives_what_it_expects(name) -> None:
    """`root/` has what the probes read, `expected.json` what they must make of it, as `probe --record` writes it."""
    told = msgspec.json.decode((BOARDS / name / record_board.EXPECTED).read_bytes(), type=record_board.Expected)
    expected = Expected(profile=told.board, readings=told.readings, absent=dict(told.absent), facts=told.facts)
    lines = compare(BOARDS / name / record_board.ROOT, expected)
    assert len(lines) > len(told.readings)
    assert [line for line in lines if not line.same] == []


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_names_nobody(name) -> None:
    """What people contribute passes through the redaction without a change: nothing was left in it."""
    for path in sorted((BOARDS / name).rglob("*")):
        if path.is_file():
            content = path.read_text()
            assert redact(content) == content, path
