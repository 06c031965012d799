"""Run a study in its folder and write its summary.

Completed cells are kept: `DIR/<study>/<cell>/` is a normal run, or a folder of the runs of all sites. A cell is created
in `DIR/<study>/.part/` and moved when it is complete, so that an interrupted study leaves none that is incomplete.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from edge_server.journal.runs import read_versions
from edge_server.replay.study.grid import Cell
from edge_server.replay.study.pool import Tell
from edge_server.replay.study.result import CellEnded, CellStarted, Order, Result, make_order, read_result
from edge_server.replay.study.sites import digest_cell
from edge_server.replay.study.spec import Study
from edge_server.replay.study.summary import StudySummary, is_complete, summarise
from edge_server.replay.study.tables import cells_csv, groups_csv
from edge_server.report.page import render_page
from shared.runtime.durable import explain_disk_errors, replace_file
from shared.runtime.folder_lock import hold_lock

PART = ".part"

Runner: TypeAlias = Callable[[Sequence[Order], Path, Tell], None]
"""(orders, folder for logs and temporary files, callback): runs cells, on this machine or on others."""

# Runs in the report page of a study.
MOST_RUNS = 8


class StudyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of the latest execution of a study: content of its files, values of every cell by its name."""

    study: Study
    plan: dict[str, Any]
    versions: dict[str, str]
    cells: dict[str, dict[str, Any]]


def results_in(folder: Path, cells: Sequence[Cell]) -> dict[str, Result]:
    """Return the results of the completed cells by name."""
    results = {cell.name: read_result(cell, folder / cell.name) for cell in cells}
    return {name: result for name, result in results.items() if result is not None}


def complete_study(
    study: Study, plan: dict[str, Any], cells: Sequence[Cell], folder: Path, run: Runner, tell: Tell
) -> StudySummary:
    """Run every incomplete cell of a study, then write its summary; `tell` is called when a cell begins or ends.

    Raises:
        ConfigError: Another process is running this study.
        Unwritable: The disk is full.
    """
    causes: dict[str, str] = {}
    part = folder / PART

    def settle(news: CellStarted | CellEnded) -> None:
        if isinstance(news, CellEnded) and news.cause:
            causes[news.cell] = news.cause
        elif isinstance(news, CellEnded):
            shutil.rmtree(folder / news.cell, ignore_errors=True)
            (part / news.cell).rename(folder / news.cell)
        tell(news)

    with explain_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with hold_lock(folder):
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(exist_ok=True)
            results = results_in(folder, cells)
            settings = {cell.name: {"variant": cell.variant, **cell.settings, **cell.seeds} for cell in cells}
            as_run = StudyRecord(study=study, plan=plan, versions=read_versions(), cells=settings)
            replace_file(folder / "study.json", _json(as_run), durable=False)
            run([make_order(cell, part) for cell in cells if cell.name not in results], part, settle)
            summary = summarise(study.name, cells, results_in(folder, cells), causes, study.report.target)
            replace_file(folder / "summary.json", _json(summary), durable=False)
            replace_file(folder / "summary.csv", groups_csv(summary.groups).encode(), durable=False)
            replace_file(folder / "cells.csv", cells_csv(summary.rows).encode(), durable=False)
            if (html := page_of(summary, cells, folder)) is not None:
                replace_file(folder / "report.html", html.encode(), durable=False)
            if summary.is_complete:
                shutil.rmtree(part, ignore_errors=True)
    return summary


def _json(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def page_of(summary: StudySummary, cells: Sequence[Cell], folder: Path) -> str | None:
    """Return a report page of the first settings, with one run each; None if no cell is complete."""
    first: dict[str, str] = {}
    for row in summary.rows:
        if is_complete(row):
            first.setdefault(row.setting, row.cell)
    plans = {cell.name: cell.plan for cell in cells}
    runs = [digest_cell(folder / cell, plans[cell]) for cell in list(first.values())[:MOST_RUNS]]
    return render_page(runs, [summary.target] if summary.target is not None else []) if runs else None
