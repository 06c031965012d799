"""`edge-server replay`: replay a plan or run, and compare with a recorded run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from edge_server.cli.report import write
from edge_server.journal import checkpoints
from edge_server.journal.records import AnyRecord, closed_rounds
from edge_server.journal.runs import StoredRun, find_site_runs
from edge_server.replay.comparison.compare import Gap, Model, compare_runs
from edge_server.replay.comparison.compare_page import page, sites_page
from edge_server.replay.comparison.compare_sites import SitesGap, compare_sites
from edge_server.replay.comparison.compare_text import lines, sites_lines, table
from edge_server.replay.run import ReplayedRun, run_replay
from edge_server.sites.overview import find_site
from shared.codecs.dense import dense
from shared.errors import ConfigError, CorruptFile
from shared.protocol import payload
from shared.runtime.text_table import write_text

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
    gap = _gap(recorded, replayed)
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


def _gap(recorded: Sequence[StoredRun], replayed: Sequence[StoredRun]) -> Gap | SitesGap:
    """Return the gap between two runs, or the gaps of all sites."""
    if len(recorded) == len(replayed) == 1:
        return gap_between_runs(recorded[0], replayed[0])
    mine, other = ({find_site(run.records, run.folder.name): run for run in runs} for runs in (recorded, replayed))
    gaps = {site: gap_between_runs(mine[site], other[site]) for site in other if site in mine}
    before, after = ({site: run.records for site, run in runs.items()} for runs in (mine, other))
    return compare_sites(before, after, gaps)


def gap_between_runs(recorded: StoredRun, replayed: StoredRun) -> Gap:
    """Return the gap between two runs, including their final models.

    Raises:
        ConfigError: A journal does not contain the beginning of its run.
    """
    model, why = compare_models(recorded, replayed)
    return compare_runs(recorded.records, replayed.records, model, why)


def exit_code(gap: Gap | SitesGap, most: float | None) -> int:
    """Return 0, or 1 if the median error of a round's seconds is above the limit or unknown."""
    if most is None:
        return 0
    seconds = gap.spread("round_s")
    return 0 if seconds and not seconds.boundless and seconds.median <= most else EXIT_FAR


def compare_models(recorded: StoredRun, replayed: StoredRun) -> tuple[Model, str]:
    """Compare the final parameters bit by bit; return the result, and a reason if it is unknown."""
    numbers = [last_model_round(run.records) for run in (recorded, replayed)]
    if numbers[0] != numbers[1]:
        return "unknown", f"the last model is of round {numbers[0]}, the replay's of round {numbers[1]}"
    try:
        recorded_digest, replayed_digest = (_digest(run.folder, numbers[0]) for run in (recorded, replayed))
    except FileNotFoundError as error:
        return "unknown", f"there is no checkpoint {error}"
    except CorruptFile as error:
        return "unknown", str(error)
    return ("same", "") if recorded_digest == replayed_digest else ("different", "")


def last_model_round(records: Sequence[AnyRecord]) -> int:
    """Return the last round that produced a model; 0 for none."""
    return max((record.round for record in closed_rounds(records) if record.outcome == "aggregated"), default=0)


def _digest(folder: Path, number: int) -> bytes:
    """Return the digest of the payload that carries the parameters after a round to devices."""
    tree = checkpoints.load(folder / "checkpoints", number).tree
    return payload.digest(payload.pack(dense().encode(dict(sorted(tree.items())), None)[0]))
