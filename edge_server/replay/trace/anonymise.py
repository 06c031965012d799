"""Anonymise a trace: replace device names, drop texts that may contain them."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from edge_server.plan.devices import expand_devices
from edge_server.plan.plan import Plan
from edge_server.record.rows import DecisionRow, TaskRow
from edge_server.replay.trace.header import TraceHeader
from edge_server.replay.trace.trace import KEYS, Trace
from shared.errors import ConfigError
from shared.protocol.messages import derive_seed

# Value of an assignment that contains the device's name, in traces of old versions.
OWN_NAME = "device"
# Tables ordered by round and device.
SORTED = ("tasks", "steps", "decisions")


def anonymise(trace: Trace) -> Trace:
    """Return the trace with numbered devices and without failure causes, notes and absolute paths.

    Raises:
        ConfigError: The partition depends on the devices' names.
    """
    header = trace.header
    if header.plan.partition.kind == "client":
        raise ConfigError(
            "the plan's partition is by client, so data depend on device names; export without --anonymous"
        )
    names = _names([device.name for device in header.devices], "device")
    unheard = [device.name for device in expand_devices(header.plan.device) if device.name not in names]
    names |= _names(unheard, "unheard")
    seed = header.plan.seed
    tables = {table: tuple(_rename_row(row, names, seed) for row in rows) for table, rows in trace.tables.items()}
    tables |= {table: tuple(sorted(tables[table], key=attrgetter(*KEYS[table]))) for table in SORTED}
    return Trace(_header(header, names), tables)


def _names(originals: list[str], prefix: str) -> dict[str, str]:
    width = len(str(len(originals)))  # equal length, so that they sort by number
    return {name: f"{prefix}-{place:0{width}d}" for place, name in enumerate(originals)}


def _rename_row(row: Any, names: Mapping[str, str], seed: int) -> Struct:
    changes: dict[str, Any] = {"device": names[row.device]} if "device" in row.__struct_fields__ else {}
    if isinstance(row, TaskRow) and row.cause:
        changes["cause"] = "failed"
    if isinstance(row, DecisionRow):  # the seed is a function of the name and would confirm a guess
        changes["seed"] = derive_seed(seed, row.round, names[row.device])
        if row.values.get(OWN_NAME) == row.device:
            changes["values"] = row.values | {OWN_NAME: names[row.device]}
    renamed: Struct = msgspec.structs.replace(row, **changes)
    return renamed


def _strip_folders(value: Any) -> Any:
    """Return a plan's values with absolute paths reduced to their last part."""
    if isinstance(value, dict):
        return {key: _strip_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_strip_folders(item) for item in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def _header(header: TraceHeader, names: Mapping[str, str]) -> TraceHeader:
    devices = [msgspec.structs.replace(device, name=names[device.name]) for device in header.devices]
    planned = (
        msgspec.structs.replace(device, name=names[device.name]) for device in expand_devices(header.plan.device)
    )
    plan = msgspec.structs.replace(header.plan, device=list(planned))
    return msgspec.structs.replace(
        header,
        anonymous=True,
        devices=devices,
        plan=msgspec.convert(_strip_folders(msgspec.to_builtins(plan)), Plan),
        rewound=[msgspec.structs.replace(entry, cause="") for entry in header.rewound],
        notes=[],
    )
