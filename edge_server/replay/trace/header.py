"""The header of a trace, `trace.json`: what the tables mean, and all of the run that is no table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec

from edge_server.plan.plan import Plan, check_structure
from edge_server.replay.trace.schema import TABLES, columns, unit_of
from shared.errors import ConfigError

FORMAT, VERSION = "fieldfleet-trace", 1
FILE = "trace.json"
MAX_BYTES = 16 << 20


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what stands in the header; keys that the reader does not know are ignored."""


class TracedDevice(Header, frozen=True, kw_only=True):
    """A device of the trace: its name, the id of its board's profile and its agent's version, where they were told."""

    name: str
    board: str = ""
    version: str = ""


class Process(Header, frozen=True, kw_only=True):
    """A server process: the second of the run at which it began, calendar seconds of that moment, its versions."""

    run_s: float
    utc_s: float | None = None
    versions: dict[str, str] = {}


class Table(Header, frozen=True, kw_only=True):
    """A table: how many rows it has, and every column's unit."""

    rows: int
    columns: dict[str, str]


class Rewind(Header, frozen=True, kw_only=True):
    """The run went back to before a round, whose rows are those of its repetition."""

    round: int
    cause: str = ""


class End(Header, frozen=True, kw_only=True):
    """How the run ended."""

    outcome: Literal["finished", "stopped", "diverged", "refused"]
    cause: str = ""


class Evaluation(Header, frozen=True, kw_only=True):
    """What all devices that were there measured after a round.

    Attributes:
        round: The last one before it.
        personal: Whether each device tried a model of its own.
    """

    round: int
    accuracy: float | None = None
    personal: bool = False


class Statistics(Header, frozen=True, kw_only=True):
    """Running statistics of a split network were measured anew after a round, over so many batches."""

    round: int
    batches: int


ClassShares: TypeAlias = Annotated[tuple[float | None, ...], msgspec.Meta(max_length=100)]
"""Shares of right answers in the order of the labels; None of a class without examples."""


class TraceHeader(Header, frozen=True, kw_only=True):
    """The whole header.

    Attributes:
        format: Always `fieldfleet-trace`.
        started: Calendar time for people.
        anonymous: Whether devices have other names than they had.
        draw: Who draws first weights: see `shared.models.build`; empty for torch's generator, as in old traces.
        statistics_batches: Over how many batches running statistics are measured; 0: they are not, as in old traces.
        marked: Whether texts that a spreadsheet would compute have the mark `'` before them; in old traces not.
        plan: What the run did; its data's path is relative to the folder of data sets.
        devices: In the order in which they share the plan's data set.
        processes: Of the server, in order.
        measured: Whether training steps were timed before the first round.
        evaluated: Whether the devices tried the finished model.
        device_accuracy: What came of it.
        evaluations: Every time that all devices evaluated, be it that model or each its own.
        statistics: Every time that running statistics were measured anew.
        class_accuracy: Of the aggregated model on the server's test data by class, by the round before the test.
        terms: The method's own figures of its training, by round: loss terms, supervised steps.
        rewound: When the run lost a checkpoint.
        notes: What a reader of the figures must know.
        ended: None where the run did not end.
    """

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
    rewound: list[Rewind] = []
    notes: list[str] = []
    ended: End | None = None


class _First(Header, frozen=True, kw_only=True):
    format: str = ""
    version: int = 0


def encode(header: TraceHeader) -> bytes:
    """Return the header as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(header), indent=1) + b"\n"


def decode(data: bytes, path: Path) -> TraceHeader:
    """Return the header in the file at `path`.

    Raises:
        ConfigError: It is none, of a newer schema, or contradicts itself or the schema.
    """
    try:
        first = msgspec.json.decode(data, type=_First)
        if first.format != FORMAT:
            raise ConfigError(f"{path}: no header of a trace; name a folder that `edge-server trace export` wrote")
        if first.version != VERSION:
            raise ConfigError(
                f"{path}: written in version {first.version} of the schema, this is version {VERSION}: "
                "read it with the fieldfleet that wrote it, or with a newer one"
            )
        header = msgspec.json.decode(data, type=TraceHeader)
        msgspec.msgpack.encode(header)  # raises OverflowError: such an integer could not be told to anybody
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
        raise ConfigError(f"{path}: devices: one is named twice")
    moments = [process.run_s for process in header.processes]
    if moments != sorted(moments) or any(moment < 0 for moment in moments):
        raise ConfigError(f"{path}: processes: time runs backwards; restore the file from a copy")
    for table in TABLES:
        if table not in header.tables:
            raise ConfigError(f"{path}: tables: {table!r} is missing")
        units = header.tables[table].columns
        for column in columns(table):
            if column not in units:
                raise ConfigError(f"{path}: {table}: column {column!r} is missing; every column of version 1 is needed")
            if units[column] != unit_of(column):
                raise ConfigError(
                    f"{path}: {table}: {column} is in {units[column]!r}, not in {unit_of(column)!r}: convert it"
                )
