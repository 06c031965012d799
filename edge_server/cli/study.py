"""The command `edge-server study`: its arguments; all else is imported when it is given."""

from __future__ import annotations

import argparse
from pathlib import Path


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes besides the folders and the format."""
    parser.add_argument("study", type=Path, metavar="STUDY")
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="runs at a time; default: one a processor")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="run the cells of such names alone, as 'fedspu_*'; may be given again",
    )
    parser.add_argument(
        "--ray", default="", metavar="ADDRESS", help="on this Ray cluster; auto: the one of this machine"
    )


def study(options: argparse.Namespace) -> int:
    """Run every plan of a study that has not been run yet, each in a process of its own."""
    from edge_server.study.terminal import run_study  # noqa: PLC0415

    return run_study(options)
