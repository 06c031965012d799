"""`edge-server report`: write one file from one or more runs."""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.cli import folders

if TYPE_CHECKING:
    from edge_server.journal.records import AnyRecord
    from edge_server.journal.rollouts.state import RolloutState
    from edge_server.report.digest import Digest
    from edge_server.report.sites.digest import SitesDigest

FORMATS = ("html", "csv", "json")
PAGE = "report.html"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help=f"{folders.RUN_OR_SITES_HELP}; the first is the reference of the comparison",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"default: {PAGE} in the folder of the first RUN; for CSV and JSON: standard output",
    )
    parser.add_argument("--format", choices=FORMATS, help="default: by FILE's suffix, otherwise html")
    parser.add_argument(
        "--target",
        type=parse_target,
        action="append",
        default=[],
        metavar="VALUE",
        help="target accuracy from 0 to 1, or value of the metric by which the plan compares models; may be repeated; "
        "default: the highest whole percent that every run reached, and 5 and 10 points less",
    )


def parse_target(text: str) -> float:
    """Parse a target value.

    Raises:
        argparse.ArgumentTypeError: It is not a finite number.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number: use a share such as 0.9 for an accuracy")
    return value


def require_reachable(targets: Sequence[float], runs: Sequence[Digest]) -> None:
    """Refuse targets that no accuracy reaches, if all runs are compared by it.

    Raises:
        ConfigError: A target is not a share above 0, at most 1.
    """
    from edge_server.journal.compared_metric import ACCURACY  # noqa: PLC0415
    from edge_server.report.digest import common_metric  # noqa: PLC0415
    from shared.errors import ConfigError  # noqa: PLC0415

    wrong = [target for target in targets if not 0 < target <= 1]
    if wrong and common_metric(runs) == ACCURACY:
        raise ConfigError(f"--target {wrong[0]:g} is not an accuracy: use a share such as 0.9")


def report(options: argparse.Namespace) -> int:
    """Write the report.

    Raises:
        ConfigError: A run is missing, or its journal has no beginning.
        Unwritable: The file cannot be written.
    """
    from edge_server.journal.rollouts.state import rollouts_of  # noqa: PLC0415
    from edge_server.journal.runs import find_site_runs  # noqa: PLC0415
    from edge_server.report.summarise import digest_run  # noqa: PLC0415

    matches = [run for name in dict.fromkeys(options.runs) for run in find_site_runs(options.data_dir, name)]
    named_runs = list({run.folder: run for run in matches}.values())
    digests = make_names_unique([digest_run(run.records) for run in named_runs])
    require_reachable(options.target, digests)
    sites = _digest_sites([(digest, run.records) for digest, run in zip(digests, named_runs, strict=True)])
    kind = options.format or format_of(options.out)
    rollouts = rollouts_of(options.data_dir, {run.folder.name for run in named_runs})
    text = _render(kind, digests, options.target, rollouts, sites)
    out = options.out or (named_runs[0].folder / PAGE if kind == "html" else None)
    if out is None:
        sys.stdout.writelines(text)
        return 0
    write(out, text)
    sys.stdout.write(f"report: {out}\n")
    return 0


def _digest_sites(runs: Sequence[tuple[Digest, Sequence[AnyRecord]]]) -> Sequence[SitesDigest]:
    """Return the digests of runs of several sites; numpy is imported only if there are any."""
    if not any(digest.plan.sites for digest, _ in runs):
        return []
    from edge_server.report.sites.summarise import digest_sites  # noqa: PLC0415

    return digest_sites(runs)


def make_names_unique(runs: Sequence[Digest]) -> list[Digest]:
    """Return the digests with a number added to repeated names."""
    from msgspec.structs import replace  # noqa: PLC0415

    counts: Counter[str] = Counter()
    renamed = []
    for run in runs:
        counts[run.run] += 1
        renamed.append(run if counts[run.run] == 1 else replace(run, run=f"{run.run} ({counts[run.run]})"))
    return renamed


def format_of(out: Path | None) -> str:
    """Return the format of a file by its suffix; by default HTML."""
    suffix = out.suffix.removeprefix(".").lower() if out else ""
    return suffix if suffix in FORMATS else "html"


def write(path: Path, text: Iterable[str]) -> None:
    """Write a file atomically.

    Raises:
        ConfigError: The folder is missing or not writable.
        Unwritable: The disk is full or read-only.
    """
    from shared.errors import ConfigError  # noqa: PLC0415
    from shared.runtime.durable import replace_file  # noqa: PLC0415

    try:
        replace_file(path, (part.encode() for part in text), durable=False, concurrent=True)
    except (FileNotFoundError, NotADirectoryError, PermissionError, IsADirectoryError) as error:
        raise ConfigError(f"--out {path}: {error.strerror}; choose a file in an existing folder") from error


def _render(
    kind: str,
    runs: Sequence[Digest],
    targets: Sequence[float],
    rollouts: Sequence[RolloutState],
    sites: Sequence[SitesDigest],
) -> Iterable[str]:
    """Return the file's text in parts, so that the tasks of a long run are never in memory at once."""
    match kind:
        case "csv":
            from edge_server.report.csv_export import csv_text  # noqa: PLC0415

            return csv_text(runs, targets, sites)
        case "json":
            from edge_server.report.json_export import json_text  # noqa: PLC0415

            return json_text(runs, targets, rollouts, sites)
        case _:
            from edge_server.report.page import render_page  # noqa: PLC0415

            return [render_page(runs, targets, rollouts, sites)]
