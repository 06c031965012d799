"""Runs into traces and traces into runs, on disk.

A plan whose paths mean the same on another machine: relative to the folder of data sets.

A trace without the devices' names, nor words in which they may stand.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from edge_server.journal.runs import exists, find, make_folder
from edge_server.journal.sqlite import SqliteJournal
from edge_server.plan.devices import DevicePlan, expanded
from edge_server.plan.plan import Plan
from edge_server.replay.trace import files
from edge_server.replay.trace.export import trace_of
from edge_server.replay.trace.header import Trial
from edge_server.replay.trace.import_run import records_of
from edge_server.replay.trace.schema import DecisionRow, Step, TableRow, TaskRow
from edge_server.replay.trace.trace import Trace
from shared.errors import ConfigError
from shared.protocol.messages import mix
from shared.protocol.topics import check_name

OWN_NAME = "device"
"""Among the values of an assignment, in traces of versions that told a device its own name there."""

SORTED = ("tasks", "steps", "decisions")
"""Tables in order of round and device."""


def portable(plan: Plan, data_root: Path) -> Plan:
    """Return a plan of which what lies below `data_root` is named relative to it; `plan.placed` undoes it."""
    devices = [_portable(device, data_root) for device in plan.device]
    own = _relative(plan.server_data, data_root)
    return msgspec.structs.replace(plan, data=_relative(plan.data, data_root), server_data=own, device=devices)


def _portable(device: DevicePlan, data_root: Path) -> DevicePlan:
    link, power = _relative(device.link, data_root), _relative(device.power, data_root)
    return msgspec.structs.replace(device, link=link, power=power)


def _relative(section: Any, data_root: Path) -> Any:
    path = getattr(section, "path", "")
    if not path or not Path(path).is_relative_to(data_root):
        return section
    return msgspec.structs.replace(section, path=Path(path).relative_to(data_root).as_posix())


def anonymised(trace: Trace) -> Trace:
    """Return the trace with devices named by their place, without causes of failures, notes and absolute paths.

    Raises:
        ConfigError: The names decide which device has which examples.
    """
    header = trace.header
    if header.plan.partition.kind == "client":
        raise ConfigError("the plan's partition is by client: the devices' names say whose data they have; keep them")
    names = _names([device.name for device in header.devices], "device")
    unheard = [device.name for device in expanded(header.plan.device) if device.name not in names]
    names |= _names(unheard, "unheard")
    seed = header.plan.seed
    tables = {table: tuple(_renamed(row, names, seed) for row in rows) for table, rows in trace.tables.items()}
    tables |= {table: tuple(sorted(tables[table], key=_place)) for table in SORTED}
    return Trace(_header(header, names), tables)


def _names(known: list[str], word: str) -> dict[str, str]:
    width = len(str(len(known)))  # of equal length, so that they sort as they are counted
    return {name: f"{word}-{place:0{width}d}" for place, name in enumerate(known)}


def _renamed(row: Any, names: Mapping[str, str], seed: int) -> TableRow:
    changes: dict[str, Any] = {"device": names[row.device]} if "device" in row.__struct_fields__ else {}
    if isinstance(row, TaskRow) and row.cause:
        changes["cause"] = "failed"
    if isinstance(row, DecisionRow):  # a seed is a function of the name: whoever guesses that would see it there
        changes["seed"] = mix(seed, row.round, names[row.device])
        if row.values.get(OWN_NAME) == row.device:
            changes["values"] = row.values | {OWN_NAME: names[row.device]}
    renamed: TableRow = msgspec.structs.replace(row, **changes)
    return renamed


def _place(row: Any) -> tuple[int, str]:
    return (0 if isinstance(row, Step) else row.round), row.device


def _without_folders(plan: Plan) -> Plan:
    """Return a plan that does not say where anything lay on its machine: of absolute paths the last name is left."""
    return msgspec.convert(_bare(msgspec.to_builtins(plan)), Plan)


def _bare(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _bare(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_bare(one) for one in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def _header(header: Trial, names: Mapping[str, str]) -> Trial:
    devices = [msgspec.structs.replace(device, name=names[device.name]) for device in header.devices]
    planned = [msgspec.structs.replace(device, name=names[device.name]) for device in expanded(header.plan.device)]
    return msgspec.structs.replace(
        header,
        anonymous=True,
        devices=devices,
        plan=_without_folders(msgspec.structs.replace(header.plan, device=planned)),
        rewound=[msgspec.structs.replace(one, cause="") for one in header.rewound],
        notes=[],
    )


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
    found = trace_of_run(data_dir, run, data_root)
    found = anonymised(found) if anonymous else found
    files.write(found, folder)
    return found


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


def portable_trace(found: Trace, data_root: Path) -> Trace:
    """Return a trace in which the path of the data is relative to the folder of data sets."""
    return Trace(msgspec.structs.replace(found.header, plan=portable(found.header.plan, data_root)), found.tables)


def import_trace(found: Trace, data_dir: Path, name: str = "") -> Path:
    """Make a run of a trace; return the run's folder.

    Args:
        name: Of the run; empty for the one that it had.

    Raises:
        ConfigError: There is a run of that name.
    """
    run = check_name(name or found.header.run, "run")
    if exists(make_folder(data_dir), run):
        raise ConfigError(f"run {run!r} is in {data_dir} already; give another name with --as")
    with closing(SqliteJournal(data_dir / run)) as store:
        store.extend(records_of(found, run))
    return data_dir / run


def summary(found: Trace) -> str:
    """Return a trace in a few lines."""
    header = found.header
    ended = header.ended.outcome if header.ended else "unfinished"
    rows = ", ".join(f"{table} {len(rows)}" for table, rows in found.tables.items())
    lines = [f"{header.run}: {header.plan.algorithm.name}, {len(header.devices)} devices, {ended}", f"rows: {rows}"]
    return "\n".join(lines + [f"note: {note}" for note in header.notes])
