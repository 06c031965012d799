"""`edge-server runs`: list, remove and prune runs."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from edge_server.cli import folders
from edge_server.cli.terminal import write_text
from edge_server.journal.runs import StoredRun, all_runs, find_run, folders_of_runs, is_empty, summarise_runs
from shared.errors import ConfigError
from shared.protocol.units import BYTES, choose_unit
from shared.runtime.command_line import add_command
from shared.runtime.folder_lock import hold_lock
from shared.runtime.text_table import terminal_columns

EXIT_INCOMPLETE = 1
"""A run to remove is in use."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command, which lists runs without a verb."""
    folders.add_options(parser, form=True)
    verbs = parser.add_subparsers(dest="verb", metavar="[VERB]", help="default: list the runs")
    rm = add_command(verbs, "rm", "remove runs with their journals, checkpoints, updates and logs")
    help_ = "full name of a run: removed without a question; a prefix, `last` or a path: asks first"
    rm.add_argument("runs", nargs="+", metavar="RUN", help=help_)
    rm.add_argument("--yes", action="store_true", help="never ask")
    rm.add_argument("--dry-run", action="store_true", help="print what would be removed, and remove nothing")
    prune = add_command(
        verbs,
        "prune",
        "remove old runs and folders of runs that never started; keep runs that can be resumed",
    )
    prune.add_argument("--keep", type=_parse_count, required=True, metavar="N", help="number of newest runs to keep")
    prune.add_argument("--unfinished", action="store_true", help="also remove runs that could be resumed")
    prune.add_argument("--dry-run", action="store_true", help="print what would be removed, and remove nothing")
    for verb in (rm, prune):
        folders.add_options(verb, again=True)


def _parse_count(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of runs: use 0 or more")
    return int(text)


def runs(options: argparse.Namespace) -> int:
    """List, remove or prune runs.

    Raises:
        ConfigError: A named run is missing, or in use.
    """
    match options.verb:
        case "rm":
            return _remove_named(options)
        case "prune":
            return _prune(options)
        case _:
            return _list(options)


def _list(options: argparse.Namespace) -> int:
    summaries = summarise_runs(options.data_dir)
    if options.format == "json":
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(summaries), indent=1).decode() + "\n")
        return 0
    from edge_server.trial.tables import runs_table  # noqa: PLC0415

    write_text(sys.stdout, runs_table(summaries, terminal_columns(sys.stdout)))
    return 0


def _remove_named(options: argparse.Namespace) -> int:
    run_folders = {name: find_run(options.data_dir, name).folder for name in options.runs}
    if options.dry_run:
        _print_would_remove(dict.fromkeys(run_folders.values()))
        return 0
    abbreviated = {folder: name for name, folder in run_folders.items() if folder.name != Path(name).name}
    if abbreviated and not options.yes and not _confirm(abbreviated):
        return EXIT_INCOMPLETE
    return _remove(dict.fromkeys(run_folders.values()))


def _confirm(abbreviated: Mapping[Path, str]) -> bool:
    """Ask on a terminal to confirm the removal of runs whose names were abbreviated.

    Raises:
        ConfigError: Standard input is not a terminal.
    """
    for folder, name in abbreviated.items():
        if not sys.stdin.isatty():
            raise ConfigError(f"runs rm: {name!r} is not a full name; use {folder.name}, or add --yes")
        sys.stderr.write(f"remove {folder.name} ({_format_size(_size_of(folder))})? [y/N] ")
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            sys.stderr.write("nothing was removed\n")
            return False
    return True


def _print_would_remove(run_folders: Iterable[Path]) -> None:
    sys.stdout.writelines(f"would remove {folder.name} ({_format_size(_size_of(folder))})\n" for folder in run_folders)


def _size_of(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def _format_size(size: int) -> str:
    unit = choose_unit(size, BYTES, between=("GB", "kB"))
    return f"{size / unit.size:.1f} {unit.name}"


def _prune(options: argparse.Namespace) -> int:
    """Remove all but the newest runs; resumable ones are kept unless `--unfinished` is given."""
    runs = [run for run in all_runs(options.data_dir) if run.opened]
    begun = {run.folder for run in runs}
    empty = [folder for folder in folders_of_runs(options.data_dir) if folder not in begun and is_empty(folder)]
    behind = runs[options.keep :]
    stay = [] if options.unfinished else [run for run in behind if _is_resumable(run)]
    for run in stay:
        sys.stdout.write(f"kept {run.folder.name}: it is unfinished; --unfinished removes it too\n")
    chosen = [*(run.folder for run in behind if run not in stay), *empty]
    if options.dry_run:
        _print_would_remove(chosen)
        return 0
    return _remove(chosen)


def _is_resumable(run: StoredRun) -> bool:
    """Check whether the command that started a run would resume it."""
    return bool(run.opened and run.opened.started and not run.opened.imported and not run.closed)


def _remove(run_folders: Iterable[Path]) -> int:
    """Remove folders of runs that no process uses; return 1 if one is in use."""
    code = 0
    for folder in run_folders:
        size = _size_of(folder)
        try:
            with hold_lock(folder):
                shutil.rmtree(folder)
        except ConfigError as error:
            sys.stderr.write(f"edge-server: {folder.name} stays: {error}\n")
            code = EXIT_INCOMPLETE
            continue
        sys.stdout.write(f"removed {folder.name} ({_format_size(size)})\n")
    return code
