"""Export a run's journal as a trace: one table row per record."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from edge_server.journal.claims import drop_implausible
from edge_server.journal.records import AnyRecord, Joined, UpdateAccepted
from edge_server.plan.devices import expand_devices
from edge_server.plan.plan import Plan
from edge_server.replay.trace.files import describe_tables
from edge_server.replay.trace.header import Evaluation, Statistics, TracedDevice, TraceHeader
from edge_server.replay.trace.journal_index import DIGITS, IndexedJournal, index_journal
from edge_server.replay.trace.observations import fact_rows, presence_rows, sample_rows
from edge_server.replay.trace.schema import DecisionRow, Purpose, Round, Step, TableRow, TaskRow
from edge_server.replay.trace.trace import Trace
from shared.protocol.measurements import Cost, Provenance
from shared.protocol.messages import count_steps


def trace_of(records: Sequence[AnyRecord]) -> Trace:
    """Return the trace of a run.

    Raises:
        ConfigError: The journal lacks the start of the run.
    """
    journal = index_journal(records)
    tables: dict[str, tuple[TableRow, ...]] = {
        "tasks": tuple(_tasks(journal)),
        "steps": tuple(_steps(journal)),
        "rounds": tuple(_rounds(journal)),
        "decisions": tuple(_decisions(journal)),
        "readings": tuple(sample_rows(journal.sensed)),
        "facts": tuple(fact_rows(journal.sensed)),
        "availability": tuple(presence_rows(journal.presence, journal.working_spans())),
    }
    return Trace(_header(journal, tables), tables)


def _header(journal: IndexedJournal, tables: dict[str, tuple[TableRow, ...]]) -> TraceHeader:
    run_opened, evaluated = journal.run_opened, journal.evaluated[-1:]
    closed = [(number, close) for number, (close, _) in sorted(journal.closed.items())]
    return TraceHeader(
        run=run_opened.run,
        started=run_opened.started,
        draw=run_opened.draw,
        statistics_batches=run_opened.statistics_batches,
        plan=run_opened.plan,
        devices=_devices(journal),
        processes=journal.processes,
        tables=describe_tables(tables),
        measured=journal.measured is not None,
        evaluated=bool(evaluated),
        device_accuracy=evaluated[0].accuracy if evaluated else None,
        evaluations=[
            Evaluation(
                round=evaluation.round,
                accuracy=evaluation.accuracy,
                personal=evaluation.personal,
                metrics=evaluation.metrics,
            )
            for evaluation in journal.evaluated
            if evaluation.round is not None
        ],
        statistics=[
            Statistics(round=number, batches=close.statistics_batches)
            for number, close in closed
            if close.statistics_batches is not None
        ],
        class_accuracy={number: close.class_accuracy for number, close in closed if close.class_accuracy},
        terms={number: close.terms for number, close in closed if close.terms},
        compared=run_opened.compared,
        metrics={number: close.metrics for number, close in closed if close.metrics} or msgspec.UNSET,
        device_metrics={number: close.device_metrics for number, close in closed if close.device_metrics}
        or msgspec.UNSET,
        rewound=journal.rewound,
        notes=journal.notes,
        ended=journal.ended,
    )


def _devices(journal: IndexedJournal) -> list[TracedDevice]:
    """Return every device, first those of the plan, in the order of the fleet that shares the data set."""
    names = {record.device for record, _ in (*journal.presence, *journal.sensed)}
    names |= {device for _, device in journal.accepted}
    names |= {device for record, _ in journal.rounds.values() for device in record.assignments}
    names |= {*journal.measured.by_device, *journal.measured.failed} if journal.measured else set()
    versions = {
        record.device: record.version for record, _ in journal.presence if isinstance(record, Joined) and record.version
    }
    boards = {record.device: record.board for record, _ in journal.sensed if record.board}
    ordered = sort_by_fleet(journal.run_opened.plan, names)
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


def _rounds(journal: IndexedJournal) -> Iterable[Round]:
    for number in sorted(journal.rounds.keys() | journal.closed.keys()):
        round_opened, opened_s = journal.rounds.get(number, (None, None))
        closed, closed_s = journal.closed.get(number, (None, None))
        fields: dict[str, Any] = {}
        if closed:
            names = ("outcome", "seconds", "loss", "accuracy", "test_loss", "device_accuracy", "steps", "refused")
            fields = {name: getattr(closed, name) for name in names} | {"arrived": len(closed.arrived)}
        if round_opened:
            fields |= {"online": round_opened.online, "asked": len(round_opened.assignments)}
        yield Round(**{"round": number, "opened_s": opened_s, "closed_s": closed_s, "outcome": "open"} | fields)


def _decisions(journal: IndexedJournal) -> Iterable[DecisionRow]:
    for number, (round_opened, _) in sorted(journal.rounds.items()):
        for device, assignment in sorted(round_opened.assignments.items()):
            hyper = msgspec.structs.asdict(assignment.hyper)
            del hyper["step_options"]  # the same for all; the header has the plan
            yield DecisionRow(
                round=number,
                device=device,
                seed=assignment.seed,
                steps=assignment.steps,
                values=assignment.values,
                **hyper,
            )


def _steps(journal: IndexedJournal) -> Iterable[Step]:
    for device, step in sorted(journal.measured.by_device.items() if journal.measured else ()):
        yield Step(device=device, **msgspec.structs.asdict(step))


def _task_causes(journal: IndexedJournal) -> dict[tuple[int, str], str]:
    """Return the cause of failure of every task by round and device; empty if it did not fail."""
    causes = {(number, device): "" for number, (opened, _) in journal.rounds.items() for device in opened.assignments}
    causes |= dict.fromkeys(journal.accepted, "")
    causes |= {(n, device): cause for n, (close, _) in journal.closed.items() for device, cause in close.failed.items()}
    if journal.measured:
        causes |= {(0, device): cause for device, cause in journal.measured.failed.items()}
    return causes


def _tasks(journal: IndexedJournal) -> Iterable[TaskRow]:
    for (number, device), cause in sorted(_task_causes(journal).items()):
        purpose = _purpose(journal, number)
        accepted, arrived_s = journal.accepted.get((number, device), (None, None))
        closed = journal.closed.get(number)
        settled_cost = journal.settled_costs.get((number, device))
        missed_steps = closed[0].missed.get(device, 0) if closed and closed[0].steps is not None else None
        if accepted is None or (closed and device not in closed[0].arrived):
            row = _absent_row(number, device, purpose, cause, settled_cost)
            yield msgspec.structs.replace(row, missed_steps=missed_steps)
            continue
        round_opened, opened_s = journal.rounds.get(number, (None, None))
        yield TaskRow(
            round=number,
            device=device,
            purpose=purpose,
            outcome="arrived",
            **_arrival_fields(accepted, settled_cost, opened_s, arrived_s),
            steps=count_steps(round_opened.assignments[device], accepted.update.num_examples) if round_opened else None,
            missed_steps=missed_steps,
        )


def _purpose(journal: IndexedJournal, number: int) -> Purpose:
    rounds = journal.run_opened.plan.rounds
    if number <= rounds:
        return "train" if number else "measure"
    closed = journal.closed.get(number - rounds - 1)
    return "statistics" if closed and closed[0].statistics_batches is not None else "evaluate"


def _absent_row(number: int, device: str, purpose: Purpose, cause: str, cost: Cost | None) -> TaskRow:
    """Return the row of a task whose update does not count; the cost of a late one is known."""
    if cost is None or cause:
        outcome: Literal["failed", "missing"] = "failed" if cause else "missing"
        return TaskRow(round=number, device=device, purpose=purpose, outcome=outcome, cause=cause)
    return TaskRow(round=number, device=device, purpose=purpose, outcome="late", settled=True, **_cost_fields(cost))


def _cost_fields(cost: Cost) -> dict[str, Any]:
    hertz = cost.cycles / cost.cpu_s if cost.cycles is not None and cost.cpu_s else None
    provenance = dict(cost.provenance)
    if hertz is not None and "cycles" in provenance:
        provenance["hertz"] = Provenance(source="cycles / cpu_s", quality=provenance["cycles"].quality)
    return msgspec.structs.asdict(cost) | {"hertz": hertz, "provenance": provenance}


def _arrival_fields(
    record: UpdateAccepted, settled_cost: Cost | None, opened_s: float | None, arrived_s: float | None
) -> Any:
    update, cost = record.update, drop_implausible(settled_cost or record.update.cost)
    params = update.params
    return _cost_fields(cost) | {
        "arrived_s": arrived_s,
        "began_s": _began_s(cost, opened_s, arrived_s),
        "settled": settled_cost is not None,
        "arrived_bytes": record.bytes_up,
        "payload_bytes": params.size if params else None,
        "payload_digest": params.digest.hex() if params else "",
        "frame_bytes": params.frame_bytes if params else None,
        "start_digest": update.start.hex(),
        "weight": update.weight,
        "examples": update.num_examples,
        "loss": update.loss,
        "metrics": update.metrics,
    }


def _began_s(cost: Cost, opened_s: float | None, arrived_s: float | None) -> float | None:
    """Return a task's start by the server's clock: arrival minus its spans, but not before its round."""
    parts = (cost.download_s, cost.compute_s, cost.upload_s)
    if arrived_s is None or None in parts:
        return None
    began_s = arrived_s - sum(part or 0.0 for part in (*parts, cost.exchange_s))
    return round(min(arrived_s, max(began_s, opened_s or 0.0)), DIGITS)
