"""Trace in memory, and consistency checks of its rows."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar, cast

from msgspec import Struct

from edge_server.record.rows import DecisionRow, Fact, Presence, Round, Sample, Step, TaskRow, unit_of
from edge_server.replay.trace.header import TraceHeader
from shared.errors import ConfigError

R = TypeVar("R", bound=Struct)

KEYS: Mapping[str, tuple[str, ...]] = {
    "tasks": ("round", "device"),
    "steps": ("device",),
    "rounds": ("round",),
    "decisions": ("round", "device"),
    "readings": ("at_s", "device", "name"),
    "facts": ("at_s", "device", "name"),
    "availability": ("at_s", "device", "event", "cause"),
}
"""Columns that identify a row of a table."""


class RowsOf(Generic[R]):
    """Attribute of a trace: the rows of one of its tables, in order."""

    def __init__(self, name: str, kind: type[R]) -> None:  # noqa: ARG002 - the type of the rows
        self._name = name

    def __get__(self, trace: Trace, owner: type[Trace]) -> tuple[R, ...]:
        return cast("tuple[R, ...]", trace.tables[self._name])


@dataclass(frozen=True)
class Trace:
    """Trace of one run.

    Attributes:
        tables: Rows by table name, in order.
    """

    header: TraceHeader
    tables: Mapping[str, tuple[Struct, ...]]

    tasks = RowsOf("tasks", TaskRow)
    steps = RowsOf("steps", Step)
    rounds = RowsOf("rounds", Round)
    decisions = RowsOf("decisions", DecisionRow)
    readings = RowsOf("readings", Sample)
    facts = RowsOf("facts", Fact)
    presence = RowsOf("availability", Presence)


def check_trace(trace: Trace, folder: Path) -> Trace:
    """Return the trace after checking that its rows are consistent.

    Raises:
        ConfigError: They are not; the message names the file in `folder` and the line.
    """
    names = {device.name for device in trace.header.devices}
    for table, rows in trace.tables.items():
        path, key = folder / f"{table}.csv", KEYS[table]
        first_lines: dict[Hashable, int] = {}
        last_s = 0.0
        for line, row in enumerate(rows, 2):
            device, at_s = getattr(row, "device", None), getattr(row, "at_s", last_s)
            if device is not None and device not in names:
                raise ConfigError(f"{path}:{line}: device {device!r} is not among the header's devices; add it there")
            values = tuple(getattr(row, name) for name in key)
            if (first := first_lines.setdefault(values, line)) != line:
                key_text = ", ".join(f"{name} {value}" for name, value in zip(key, values, strict=True))
                raise ConfigError(f"{path}:{line}: duplicate of line {first} ({key_text}); remove one")
            if at_s < last_s:
                raise ConfigError(f"{path}:{line}: time runs backwards, from {last_s} s to {at_s} s; sort the rows")
            last_s = at_s
    for line, sample in enumerate(trace.readings, 2):
        _require_plausible(sample, f"{folder / 'readings.csv'}:{line}")
    _require_rounds(trace, folder)
    return trace


def _require_plausible(sample: Sample, where: str) -> None:
    if sample.value < 0 and not sample.name.endswith("_celsius"):
        raise ConfigError(f"{where}: {sample.name} is {sample.value}; it must not be negative")
    if sample.unit != unit_of(sample.name):
        raise ConfigError(f"{where}: {sample.name} is in {sample.unit!r}, not in {unit_of(sample.name)!r}: convert it")


def _require_rounds(trace: Trace, folder: Path) -> None:
    opened_s, number, rounds = 0.0, 0, set()
    for line, row in enumerate(trace.rounds, 2):
        where = f"{folder / 'rounds.csv'}:{line}"
        begin_s = row.opened_s if row.opened_s is not None else opened_s
        if row.round <= number or begin_s < opened_s or (row.closed_s is not None and row.closed_s < begin_s):
            raise ConfigError(f"{where}: time runs backwards in round {row.round}; sort or correct the rows")
        if row.outcome != "open" and row.seconds is None:
            raise ConfigError(f"{where}: round {row.round} has ended, but its seconds are missing; add them")
        opened_s, number = begin_s, row.round
        rounds.add(row.round)
    for line, task in enumerate(trace.tasks, 2):
        where = f"{folder / 'tasks.csv'}:{line}"
        if task.purpose == "train" and task.round not in rounds:
            raise ConfigError(f"{where}: round {task.round} is not in rounds.csv; add it there")
        if task.began_s is not None and task.arrived_s is not None and task.arrived_s < task.began_s:
            raise ConfigError(f"{where}: it arrived before it began; correct the row")
