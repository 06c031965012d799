"""Cells of the studies in deploy/studies, which nobody changes; paths of data are relative."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec

from edge_server.replay.study.cell import run_cell
from edge_server.replay.study.grid import Cell, build_cells
from edge_server.replay.study.result import Result, make_order, read_result
from edge_server.replay.study.spec import load

STUDIES = Path(__file__).resolve().parents[4] / "deploy" / "studies"


@cache
def grid(name: str) -> list[Cell]:
    path = STUDIES / f"{name}.toml"
    study, plan = load(path)
    return build_cells(study, plan, path, path.read_text(), Path())


def require_only_algorithms_differ(cells: list[Cell]) -> None:
    """Check that cells of one setting differ in their algorithm and seed alone."""
    first = cells[0]
    same = {
        msgspec.json.encode(msgspec.structs.replace(cell.plan, algorithm=first.plan.algorithm, seed=0))
        for cell in cells
        if cell.settings == first.settings
    }
    assert len(same) == 1


def run(cell: Cell, folder: Path) -> tuple[Path, Result]:
    """Run a cell; return where its result lies, and the result."""
    place = run_cell(make_order(cell, folder))
    result = read_result(cell, place)
    assert result is not None
    return place, result
