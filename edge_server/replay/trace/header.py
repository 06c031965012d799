"""Trace header `trace.json`: units of the tables and facts about the run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec

from edge_server.journal.compared_metric import ComparedMetric
from edge_server.plan.check import check_structure
from edge_server.plan.plan import Plan
from edge_server.plan.removed_keys import without_removed_keys
from edge_server.record.rows import TABLES, columns, is_cost_column, unit_of
from shared.errors import ConfigError

FORMAT, VERSION = "fieldfleet-trace", 1
FILE = "trace.json"
MAX_BYTES = 16 << 20


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the header's parts; unknown keys are ignored."""


class TracedDevice(Header, frozen=True, kw_only=True):
    """Device of the trace: name, profile id of its board and agent version; empty if not reported."""

    name: str
    board: str = ""
    version: str = ""


class Process(Header, frozen=True, kw_only=True):
    """Server process: run second and calendar second of its start, and its versions."""

    run_s: float
    utc_s: float | None = None
    versions: dict[str, str] = {}


class Table(Header, frozen=True, kw_only=True):
    """Number of rows and unit of every column of a table."""

    rows: int
    columns: dict[str, str]


class Rewind(Header, frozen=True, kw_only=True):
    """Return of the run to before a round; the rows of that round are those of its repetition."""

    round: int
    cause: str = ""


class End(Header, frozen=True, kw_only=True):
    """Outcome of the run."""

    outcome: Literal["finished", "stopped", "diverged", "refused"]
    cause: str = ""


class Evaluation(Header, frozen=True, kw_only=True):
    """Evaluation by all connected devices after a round, of one model or of personal ones."""

    round: int
    accuracy: float | None = None
    personal: bool = False
    metrics: dict[str, float] | msgspec.UnsetType = msgspec.UNSET


class Statistics(Header, frozen=True, kw_only=True):
    """Measurement of a split network's running statistics after a round, over so many batches."""

    round: int
    batches: int


ClassShares: TypeAlias = Annotated[tuple[float | None, ...], msgspec.Meta(max_length=100)]
"""Accuracy per class in the order of the labels; None for a class without examples."""


class TraceHeader(Header, frozen=True, kw_only=True):
    """Complete header; the README documents every key."""

    format: Literal["fieldfleet-trace"] = "fieldfleet-trace"
    version: int = VERSION
    run: str
    started: str = ""
    anonymous: bool = False
    marked: bool = False
    draw: str = ""
    statistics_batches: int = 0
    plan: Plan
    devices: list[TracedDevice]
    processes: list[Process] = []
    tables: dict[str, Table]
    measured: bool = False
    evaluated: bool = False
    device_accuracy: float | None = None
    evaluations: list[Evaluation] = []
    statistics: list[Statistics] = []
    class_accuracy: dict[int, ClassShares] = {}
    terms: dict[int, dict[str, float]] = {}
    compared: ComparedMetric | msgspec.UnsetType = msgspec.UNSET
    personal: bool | msgspec.UnsetType = msgspec.UNSET
    metrics: dict[int, dict[str, float]] | msgspec.UnsetType = msgspec.UNSET
    device_metrics: dict[int, dict[str, float]] | msgspec.UnsetType = msgspec.UNSET
    rewound: list[Rewind] = []
    notes: list[str] = []
    ended: End | None = None


class _First(Header, frozen=True, kw_only=True):
    format: str = ""
    version: int = 0


def encode(header: TraceHeader) -> bytes:
    """Encode the header as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(header), indent=1) + b"\n"


def decode(data: bytes, path: Path) -> TraceHeader:
    """Decode and check the header in the file at `path`.

    Raises:
        ConfigError: It is not a header, has a newer schema, or contradicts itself or the schema.
    """
    try:
        first = msgspec.json.decode(data, type=_First)
        if first.format != FORMAT:
            raise ConfigError(f"{path}: not the header of a trace; name a folder that `edge-server trace export` wrote")
        if first.version != VERSION:
            raise ConfigError(
                f"{path}: written in version {first.version} of the schema, this is version {VERSION}: "
                "read it with the fieldfleet version that wrote it, or with a newer one"
            )
        header = msgspec.json.decode(without_removed_keys(data), type=TraceHeader)
        msgspec.msgpack.encode(header)  # raises OverflowError for integers that no message can hold
    except OverflowError as error:
        raise ConfigError(f"{path}: an integer of more than 64 bits; restore the file from a copy") from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}; restore the file from a copy") from error
    check_structure(header.plan, path)
    _require_consistent(header, path)
    return header


def _require_consistent(header: TraceHeader, path: Path) -> None:
    names = [device.name for device in header.devices]
    if len(set(names)) != len(names):
        raise ConfigError(f"{path}: devices: two have the same name; rename one")
    moments = [process.run_s for process in header.processes]
    if moments != sorted(moments) or any(moment < 0 for moment in moments):
        raise ConfigError(f"{path}: processes: time runs backwards; restore the file from a copy")
    for table in TABLES:
        if table not in header.tables:
            raise ConfigError(f"{path}: tables: {table!r} is missing")
        units = header.tables[table].columns
        # a version that did not know a figure of a task has no column for it
        for column in (name for name in columns(table) if name in units or not is_cost_column(name)):
            if column not in units:
                raise ConfigError(f"{path}: {table}: column {column!r} is missing; every column of version 1 is needed")
            if units[column] != unit_of(column):
                raise ConfigError(
                    f"{path}: {table}: {column} is in {units[column]!r}, not in {unit_of(column)!r}: convert it"
                )
