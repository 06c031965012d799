"""Export a run's rows as a trace."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from edge_server.journal.records import (
    AnyRecord,
    Joined,
    Left,
    Measured,
    Noted,
    Rewound,
    RunClosed,
    Sensed,
    ServerBegan,
    select,
)
from edge_server.plan.devices import expand_devices
from edge_server.plan.plan import Plan
from edge_server.record.build import build_tables
from edge_server.record.index import DIGITS, RunRecord
from edge_server.record.rows import columns, common_fields, unit_of
from edge_server.replay.trace.header import (
    End,
    Evaluation,
    Process,
    Rewind,
    Statistics,
    Table,
    TracedDevice,
    TraceHeader,
)
from edge_server.replay.trace.trace import Trace


def trace_of(records: Sequence[AnyRecord]) -> Trace:
    """Return the trace of a run.

    Raises:
        ConfigError: The journal lacks the start of the run.
    """
    run = RunRecord(records)
    tables = build_tables(run)
    return Trace(_header(run, tables), tables)


def _header(run: RunRecord, tables: dict[str, tuple[Struct, ...]]) -> TraceHeader:
    opening, closing, ends = run.opening, run.last_of(RunClosed), sorted(run.ends, key=lambda end: end.round)
    return TraceHeader(
        **common_fields(opening, TraceHeader),
        devices=_devices(run),
        processes=[
            Process(
                run_s=round(record.run_s, DIGITS),
                utc_s=None if record.utc_s is None else round(record.utc_s, DIGITS),
                versions=record.versions,
            )
            for record in select(run.records, ServerBegan)
        ],
        tables={
            name: Table(rows=len(rows), columns={column: unit_of(column) for column in columns(name)})
            for name, rows in tables.items()
        },
        measured=run.last_of(Measured) is not None,
        evaluated=bool(run.evaluations),
        device_accuracy=run.last_evaluation.accuracy,
        evaluations=[
            Evaluation(**common_fields(record, Evaluation)) for record in run.evaluations if record.round is not None
        ],
        statistics=[
            Statistics(round=end.round, batches=end.statistics_batches)
            for end in ends
            if end.statistics_batches is not None
        ],
        class_accuracy={end.round: end.class_accuracy for end in ends if end.class_accuracy},
        terms={end.round: end.terms for end in ends if end.terms},
        metrics={end.round: end.metrics for end in ends if end.metrics} or msgspec.UNSET,
        device_metrics={end.round: end.device_metrics for end in ends if end.device_metrics} or msgspec.UNSET,
        rewound=[
            Rewind(round=record.round, cause=record.cause)
            for record in select(run.records, Rewound)
            if not record.missed
        ],
        notes=[note.what for note in select(run.records, Noted)],
        ended=End(**common_fields(closing, End)) if closing else None,
    )


def _devices(run: RunRecord) -> list[TracedDevice]:
    """Return every device, first those of the plan, in the order of the fleet that shares the data set."""
    measured = run.last_of(Measured)
    births = [record for record, at_s in run.with_seconds(Joined) if at_s is not None]
    reports = [record for record, at_s in run.with_seconds(Sensed) if at_s is not None]
    names = {record.device for record in births} | {record.device for record in reports}
    names |= {record.device for record, at_s in run.with_seconds(Left) if at_s is not None}
    names |= {device for _, device in run.updates}
    names |= {device for opening in run.rounds.values() for device in opening.record.assignments}
    names |= {*measured.by_device, *measured.failed} if measured else set()
    versions = {record.device: record.version for record in births if record.version}
    boards = {record.device: record.board for record in reports if record.board}
    ordered = sort_by_fleet(run.opening.plan, names)
    return [TracedDevice(name=name, board=boards.get(name, ""), version=versions.get(name, "")) for name in ordered]


def sort_by_fleet(plan: Plan, names: Iterable[str]) -> list[str]:
    """Sort names as `edge_server.plan.plan.devices` does: plan order, then device-2 before device-10."""
    positions = {device.name: place for place, device in enumerate(expand_devices(plan.device))}

    def place(name: str) -> tuple[Any, ...]:
        parts = re.split(r"(\d+)", name)
        return (
            positions.get(name, len(positions)),
            [(int(part), "") if part.isdigit() else (-1, part) for part in parts],
            name,
        )

    return sorted(names, key=place)
