"""One page of a study: the report of one run of each setting, side by side."""

from __future__ import annotations

from pathlib import Path

from edge_server.journal.sqlite import read
from edge_server.report.page import page
from edge_server.report.summarise import digest
from edge_server.study.summary import Summary

MOST_RUNS = 8
"""Runs on the page: more would have no colours of their own. The tables hold all."""


def page_of(summary: Summary, folder: Path) -> str | None:
    """Return the page of the first settings of a study, each by its first run; None where none has ended."""
    first: dict[str, str] = {}
    for row in summary.rows:
        if row.ended:
            first.setdefault(row.setting, row.cell)
    runs = [digest(read(folder / cell)) for cell in list(first.values())[:MOST_RUNS]]
    return page(runs, [summary.target] if summary.target is not None else []) if runs else None
