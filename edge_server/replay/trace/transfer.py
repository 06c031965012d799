"""Export runs as traces and import traces as runs, on disk."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import msgspec

from edge_server.journal.runs import exists, find, make_folder
from edge_server.journal.sqlite import SqliteJournal
from edge_server.replay.trace import files
from edge_server.replay.trace.anonymise import anonymise
from edge_server.replay.trace.export import trace_of
from edge_server.replay.trace.import_run import to_records
from edge_server.replay.trace.portable_plan import make_portable
from edge_server.replay.trace.trace import Trace
from shared.errors import ConfigError
from shared.protocol.topics import check_name


def export(data_dir: Path, run: str, folder: Path, data_root: Path, *, anonymous: bool = False) -> Trace:
    """Write a run's trace into a new folder; return it.

    Args:
        data_dir: Folder of the runs.
        run: Name of the run.
        data_root: Folder of data sets, to which paths become relative.
        anonymous: Whether devices' names are replaced.

    Raises:
        ConfigError: There is no such run, or something in the folder.
    """
    trace = trace_of_run(data_dir, run, data_root)
    trace = anonymise(trace) if anonymous else trace
    files.write(trace, folder)
    return trace


def trace_of_run(data_dir: Path, run: str, data_root: Path) -> Trace:
    """Return a run's trace, in which the path of the data is relative to the folder of data sets.

    Args:
        data_dir: Folder of the runs.
        run: Name of the run.
        data_root: Folder of data sets; None to keep paths as they are.

    Raises:
        ConfigError: As `edge_server.journal.runs.find`.
    """
    return portable_trace(trace_of(find(data_dir, run).records), data_root)


def portable_trace(trace: Trace, data_root: Path) -> Trace:
    """Return a trace in which the path of the data is relative to the folder of data sets."""
    return Trace(msgspec.structs.replace(trace.header, plan=make_portable(trace.header.plan, data_root)), trace.tables)


def import_trace(trace: Trace, data_dir: Path, name: str = "") -> Path:
    """Make a run of a trace; return the run's folder.

    Args:
        name: Of the run; empty for the one that it had.

    Raises:
        ConfigError: There is a run of that name.
    """
    run = check_name(name or trace.header.run, "run")
    if exists(make_folder(data_dir), run):
        raise ConfigError(f"run {run!r} is in {data_dir} already; give another name with --as")
    with closing(SqliteJournal(data_dir / run)) as store:
        store.extend(to_records(trace, run))
    return data_dir / run


def summary(trace: Trace) -> str:
    """Return a trace in a few lines."""
    header = trace.header
    ended = header.ended.outcome if header.ended else "unfinished"
    rows = ", ".join(f"{table} {len(rows)}" for table, rows in trace.tables.items())
    lines = [f"{header.run}: {header.plan.algorithm.name}, {len(header.devices)} devices, {ended}", f"rows: {rows}"]
    return "\n".join(lines + [f"note: {note}" for note in header.notes])
