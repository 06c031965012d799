"""Runs into traces and traces into runs, on disk."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import msgspec

from edge_server.journal.runs import exists, find, made
from edge_server.journal.sqlite import SqliteStore
from edge_server.trace import files
from edge_server.trace.anonymous import anonymised
from edge_server.trace.export import trace_of
from edge_server.trace.import_run import records_of
from edge_server.trace.portable import portable
from edge_server.trace.trace import Trace
from shared.errors import ConfigError
from shared.protocol.topics import checked_name


def export(data_dir: Path, run: str, folder: Path, data_root: Path, *, anonymous: bool = False) -> Trace:
    """Write a run's trace into a new folder; return it.

    Raises:
        ConfigError: There is no such run, or something in the folder.
    """
    found = of_run(data_dir, run, data_root)
    found = anonymised(found) if anonymous else found
    files.write(found, folder)
    return found


def of_run(data_dir: Path, run: str, data_root: Path) -> Trace:
    """Return a run's trace, in which the path of the data is relative to the folder of data sets.

    Raises:
        ConfigError: As `edge_server.journal.runs.find`.
    """
    found = trace_of(find(data_dir, run).records)
    return Trace(msgspec.structs.replace(found.header, plan=portable(found.header.plan, data_root)), found.tables)


def bring(folder: Path, data_dir: Path, name: str = "") -> Path:
    """Make a run of a trace; return the run's folder.

    Raises:
        ConfigError: The trace cannot be used, or there is a run of that name.
    """
    found = files.read(folder)
    run = checked_name(name or found.header.run, "run")
    if exists(made(data_dir), run):
        raise ConfigError(f"run {run!r} is in {data_dir} already; give another name with --as")
    with closing(SqliteStore(data_dir / run)) as store:
        store.extend(records_of(found, run))
    return data_dir / run


def summary(found: Trace) -> str:
    """Return a trace in a few lines."""
    header = found.header
    ended = header.ended.outcome if header.ended else "unfinished"
    rows = ", ".join(f"{table} {len(rows)}" for table, rows in found.tables.items())
    lines = [f"{header.run}: {header.plan.algorithm.name}, {len(header.devices)} devices, {ended}", f"rows: {rows}"]
    return "\n".join(lines + [f"note: {note}" for note in header.notes])
