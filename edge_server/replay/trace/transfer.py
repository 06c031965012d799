"""Export runs as traces and import traces as runs, on disk."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from edge_server.journal.runs import create_runs_folder, find_run, run_exists
from edge_server.journal.sqlite import SqliteJournal
from edge_server.plan.plan import Plan
from edge_server.replay.trace import files
from edge_server.replay.trace.anonymise import anonymise
from edge_server.replay.trace.export import trace_of
from edge_server.replay.trace.import_run import to_records
from edge_server.replay.trace.trace import Trace
from shared.errors import ConfigError
from shared.protocol.topics import check_name


def export(data_dir: Path, run: str, folder: Path, data_root: Path, *, anonymous: bool = False) -> Trace:
    """Write a run's trace into a new folder; return it.

    Args:
        data_root: Folder of data sets, to which paths become relative.

    Raises:
        ConfigError: There is no such run, or the folder is not empty.
    """
    trace = trace_of_run(data_dir, run, data_root)
    trace = anonymise(trace) if anonymous else trace
    files.write(trace, folder)
    return trace


def trace_of_run(data_dir: Path, run: str, data_root: Path) -> Trace:
    """Return the trace of a run with data paths relative to `data_root`.

    Raises:
        ConfigError: As `edge_server.journal.runs.find_run`.
    """
    return portable_trace(trace_of(find_run(data_dir, run).records), data_root)


def portable_trace(trace: Trace, data_root: Path) -> Trace:
    """Return a trace with data paths relative to `data_root`."""
    return Trace(msgspec.structs.replace(trace.header, plan=make_portable(trace.header.plan, data_root)), trace.tables)


def make_portable(plan: Plan, data_root: Path) -> Plan:
    """Return a plan with paths below `data_root` made relative to it; `plan.placed` is the inverse."""
    replace = msgspec.structs.replace

    def relative(section: Any) -> Any:
        path = getattr(section, "path", "")
        if not path or not Path(path).is_relative_to(data_root):
            return section
        return replace(section, path=Path(path).relative_to(data_root).as_posix())

    devices = [replace(device, link=relative(device.link), power=relative(device.power)) for device in plan.device]
    return replace(plan, data=relative(plan.data), server_data=relative(plan.server_data), device=devices)


def import_trace(trace: Trace, data_dir: Path, name: str = "") -> Path:
    """Write a trace as a run; return the run's folder.

    Args:
        name: Name of the run; empty to keep it.

    Raises:
        ConfigError: A run of that name exists.
    """
    run = check_name(name or trace.header.run, "run")
    if run_exists(create_runs_folder(data_dir), run):
        raise ConfigError(f"run {run!r} already exists in {data_dir}; give another name with --as")
    with closing(SqliteJournal(data_dir / run)) as store:
        store.extend(to_records(trace, run))
    return data_dir / run


def summary(trace: Trace) -> str:
    """Return a short text summary of a trace."""
    header = trace.header
    ended = header.ended.outcome if header.ended else "unfinished"
    rows = ", ".join(f"{table} {len(rows)}" for table, rows in trace.tables.items())
    lines = [f"{header.run}: {header.plan.algorithm.name}, {len(header.devices)} devices, {ended}", f"rows: {rows}"]
    return "\n".join(lines + [f"note: {note}" for note in header.notes])
