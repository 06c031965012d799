"""SUPPORT.md equals the support table and the records of tested boards."""

from __future__ import annotations

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from shared.runtime.support.table import System as Kind
from shared.runtime.support.table import find_row, read_l4t, read_missing_feature, read_table
from tests.machine import shared

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def page():
    spec = spec_from_file_location("support_page", ROOT / "deploy/support/page.py")
    found = sys.modules["support_page"] = module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_the_page_is_what_the_table_says(page):
    """Else: `python deploy/support/page.py > deploy/SUPPORT.md`."""
    assert (ROOT / "deploy/SUPPORT.md").read_text() == page.page()


def test_every_row_that_was_tried_is_a_boards(page):
    found = []
    for board in page.boards():
        kind = Kind(board.machine, board.python, board.l4t, board.lacks)
        if any(kind.fits(row) and row.python in ("", board.python) for row in read_table().row):
            found.append(find_row(read_table(), kind))
    assert {row.systems for row in found} == {row.systems for row in read_table().row if row.tested != "not yet"}


def test_most_boards_train_and_each_was_tried(page):
    """What cannot: 32 bits, JetPack 4 and 5, and boards with too little memory."""
    found = page.boards()
    assert len(found) == 18
    assert sum(board.cell("train").startswith("torch") for board in found) >= 14
    assert not [board for board in found if board.tested == "not yet" or not board.how]


def test_boards_are_as_they_were_recorded(page, tmp_path):
    """What a record has of the processor and of Jetson's system is what the page takes the board for."""
    for board in page.boards():
        if not board.record:
            continue
        files = {path.name: path.read_text() for path in shared("reference", "boards", board.record).iterdir()}
        root = tmp_path / re.sub(r"\W", "-", f"{board.name} {board.system}")
        (root / "proc").mkdir(parents=True)
        (root / "etc").mkdir()
        (root / "proc/cpuinfo").write_text(files.get("proc_cpuinfo.txt", ""))
        if "proc_cpuinfo.txt" in files:
            assert read_missing_feature(root) == board.lacks, board.name
        if releases := [text for name, text in files.items() if name.startswith("etc_nv_tegra_release")]:
            (root / "etc/nv_tegra_release").write_text(releases[0])
            assert read_l4t(root) == board.l4t, board.name
