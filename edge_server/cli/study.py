"""`edge-server study`: run a grid of plans and print a summary."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from edge_server.cli.terminal import write_text
from shared.runtime.processes import loading

if TYPE_CHECKING:
    from edge_server.replay.study.summary import StudySummary

EXIT_INCOMPLETE = 1
"""A cell has failed."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments besides folders and format."""
    parser.add_argument("study", type=Path, metavar="STUDY", help="study file")
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="parallel runs; default: one per processor")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="run only the cells whose names match PATTERN, for example 'fedspu_*'; may be repeated",
    )
    parser.add_argument(
        "--ray", default="", metavar="ADDRESS", help="address of a Ray cluster, or `auto`: the cluster of this machine"
    )


def study(options: argparse.Namespace) -> int:
    """Run every plan of a study that has no result yet, each in a process of its own."""
    with loading():
        from edge_server.replay.study.terminal import run_study  # noqa: PLC0415

    summary, folder, is_whole = run_study(options)
    _print(summary, folder, options.format)
    return 0 if is_whole else EXIT_INCOMPLETE


def _print(summary: StudySummary, folder: Path, form: str) -> None:
    if form == "json":
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(summary), indent=1).decode() + "\n")
        return
    from edge_server.replay.study.tables import tables  # noqa: PLC0415

    causes = [f"{row.cell} {row.state}: {row.cause}" for row in summary.rows if row.cause]
    write_text(sys.stdout, [*tables(summary), *causes])
    sys.stdout.write(f"record: {folder}\n")
