"""`edge-server replay`: replay a plan or run, and compare with a recorded run."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

import msgspec

from edge_server.cli.report import write
from edge_server.cli.terminal import write_text
from edge_server.journal.runs import StoredRun, find_site_runs
from edge_server.replay.comparison.compare import Gap
from edge_server.replay.comparison.compare_page import page, sites_page
from edge_server.replay.comparison.compare_sites import SitesGap
from edge_server.replay.comparison.compare_text import lines, sites_lines, table
from edge_server.replay.comparison.stored_runs import compare_site_runs
from edge_server.replay.run import ReplayedRun, handle_sigterm, run_replay
from edge_server.rounds.plugins import describe_changes
from shared.errors import ConfigError

log = logging.getLogger(__name__)
EXIT_FAR = 1
"""The gap exceeds `--fail-above`."""


def find_recorded(options: argparse.Namespace) -> list[StoredRun]:
    """Return the run to compare with, or those of several sites; called before the replay, so that errors show at once.

    Raises:
        ConfigError: There is no such run, its journal cannot be read, or an option needs `--compare`.
    """
    if options.compare:
        return find_site_runs(options.data_dir, str(options.compare))
    if options.html or options.fail_above is not None:
        raise ConfigError("--html and --fail-above need --compare RUN")
    return []


def run_command(options: argparse.Namespace) -> list[ReplayedRun]:
    """Replay what the command line names; return folder and records of each run, one per site.

    Raises:
        ConfigError: As `run_replay`.
    """
    with handle_sigterm():
        return run_replay(
            *(options.plan, options.data_root, options.data_dir, options.devices, options.workers),
            instead=options.instead,
            exact=options.exact,
            other_data=options.other_data,
            data=options.data,
            synthetic=options.synthetic,
        )


def compare_with_recorded(
    options: argparse.Namespace, recorded: Sequence[StoredRun], replayed: Sequence[StoredRun]
) -> int:
    """Report the gap between a replay and a recorded run, or those of several sites; return the exit code.

    Args:
        options: `fail_above`: largest accepted median error of a round's seconds, or None; `html`: page to write, or
            None; `format`.
        recorded: Recorded run, or one for each site.

    Raises:
        ConfigError: Several sites are compared with a run of a single server.
        Unwritable: The page cannot be written.
    """
    for before, after in zip(recorded, replayed, strict=False):
        if before.opened and after.opened and (changes := describe_changes(before.opened, after.opened.plugins or ())):
            log.warning("%s; the replay used the present code", changes)
    gap = compare_site_runs(recorded, replayed)
    if options.html:
        write(options.html, sites_page(gap) if isinstance(gap, SitesGap) else page(gap))
    if options.format == "json":
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(gap), indent=1).decode() + "\n")
    else:
        notes = sites_lines(gap) if isinstance(gap, SitesGap) else lines(gap)
        write_text(sys.stdout, [table(gap.spreads), *notes])
        if options.html:
            sys.stdout.write(f"page: {options.html}\n")
    return exit_code(gap, options.fail_above)


def exit_code(gap: Gap | SitesGap, most: float | None) -> int:
    """Return 0, or 1 if the median error of a round's seconds is above the limit or unknown."""
    if most is None:
        return 0
    seconds = gap.spread("round_s")
    return 0 if seconds and not seconds.boundless and seconds.median <= most else EXIT_FAR
