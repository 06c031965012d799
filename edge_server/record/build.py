"""Rows of a run, built one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from edge_server.journal.claims import drop_implausible
from edge_server.journal.records import Joined, Left, Measured, RoundOpened, Sensed, UpdateAccepted
from edge_server.record.index import DIGITS, RunRecord, Timed
from edge_server.record.rows import (
    DecisionRow,
    Fact,
    Presence,
    Purpose,
    Round,
    Sample,
    Step,
    TaskRow,
    unit_of,
)
from shared.protocol.measurements import Cost, Provenance
from shared.protocol.messages import count_steps

BOARD = "board"
"""Name of the fact that holds a board's profile id."""


def task_rows(run: RunRecord) -> Iterator[TaskRow]:
    """Yield a row for every task, in order of round and device."""
    for (number, device), cause in sorted(_task_causes(run).items()):
        opening, closed = run.rounds.get(number), run.round_ends.get(number)
        accepted = run.updates.get((number, device))
        final_cost = run.final_costs.get((number, device))
        is_late = closed is not None and device not in closed.record.arrived
        row: dict[str, Any] = {"round": number, "device": device, "purpose": _purpose(run, number)}
        if closed and closed.record.steps is not None:
            row["missed_steps"] = closed.record.missed.get(device, 0)
        if accepted is not None and not is_late:
            row |= _arrival_fields(accepted, final_cost, opening) | {"outcome": "arrived"}
        elif final_cost is None or cause:
            row |= {"outcome": "failed" if cause else "missing", "cause": cause}
        else:  # the cost of a late task is known
            row |= _cost_fields(final_cost) | {"outcome": "late", "settled": True}
        yield TaskRow(**row)


def _task_causes(run: RunRecord) -> dict[tuple[int, str], str]:
    """Return the cause of failure of every task by round and device; empty if it did not fail."""
    causes = {(number, device): "" for number, opening in run.rounds.items() for device in opening.record.assignments}
    causes |= dict.fromkeys(run.updates, "")
    causes |= {(end.round, device): cause for end in run.ends for device, cause in end.failed.items()}
    measured = run.last_of(Measured)
    return causes | {(0, device): cause for device, cause in (measured.failed if measured else {}).items()}


def _purpose(run: RunRecord, number: int) -> Purpose:
    rounds = run.opening.plan.rounds
    if number <= rounds:
        return "train" if number else "measure"
    closed = run.round_ends.get(number - rounds - 1)
    return "statistics" if closed and closed.record.statistics_batches is not None else "evaluate"


def _cost_fields(cost: Cost) -> dict[str, Any]:
    hertz = cost.cycles / cost.cpu_s if cost.cycles is not None and cost.cpu_s else None
    provenance = dict(cost.provenance)
    if hertz is not None and "cycles" in provenance:
        provenance["hertz"] = Provenance(source="cycles / cpu_s", quality=provenance["cycles"].quality)
    return msgspec.structs.asdict(cost) | {"hertz": hertz, "provenance": provenance}


def _arrival_fields(
    accepted: Timed[UpdateAccepted], final_cost: Cost | None, opening: Timed[RoundOpened] | None
) -> dict[str, Any]:
    update, arrived_s = accepted.record.update, accepted.at_s
    cost, params = drop_implausible(final_cost or update.cost), update.params
    return _cost_fields(cost) | {
        "arrived_s": arrived_s,
        "began_s": _began_s(cost, opening.at_s if opening else None, arrived_s),
        "settled": final_cost is not None,
        "arrived_bytes": accepted.record.bytes_up,
        "payload_bytes": params.size if params else None,
        "payload_digest": params.digest.hex() if params else "",
        "frame_bytes": params.frame_bytes if params else None,
        "start_digest": update.start.hex(),
        "weight": update.weight,
        "examples": update.num_examples,
        "loss": update.loss,
        "metrics": update.metrics,
        "steps": count_steps(opening.record.assignments[update.device], update.num_examples) if opening else None,
    }


def _began_s(cost: Cost, opened_s: float | None, arrived_s: float | None) -> float | None:
    """Return a task's start by the server's clock: arrival minus its spans, but not before its round."""
    parts = (cost.download_s, cost.compute_s, cost.upload_s)
    if arrived_s is None or None in parts:
        return None
    began_s = arrived_s - sum(part or 0.0 for part in (*parts, cost.exchange_s))
    return round(min(arrived_s, max(began_s, opened_s or 0.0)), DIGITS)


def step_rows(run: RunRecord) -> Iterator[Step]:
    """Yield a row for every device that timed its steps before the first round."""
    measured = run.last_of(Measured)
    for device, step in sorted(measured.by_device.items() if measured else ()):
        yield Step(device=device, **msgspec.structs.asdict(step))


def round_rows(run: RunRecord) -> Iterator[Round]:
    """Yield a row for every round that was opening or closed."""
    names = ("outcome", "seconds", "loss", "accuracy", "test_loss", "device_accuracy", "steps", "refused")
    for number in sorted(run.rounds.keys() | run.round_ends.keys()):
        fields: dict[str, Any] = {"round": number, "outcome": "open"}
        if closed := run.round_ends.get(number):
            fields |= {name: getattr(closed.record, name) for name in names}
            fields |= {"arrived": len(closed.record.arrived), "closed_s": closed.at_s}
        if opening := run.rounds.get(number):
            fields |= {"online": opening.record.online, "opened_s": opening.at_s}
            fields["asked"] = len(opening.record.assignments)
        yield Round(**fields)


def decision_rows(run: RunRecord) -> Iterator[DecisionRow]:
    """Yield a row for every assignment."""
    for number, opening in sorted(run.rounds.items()):
        for device, assignment in sorted(opening.record.assignments.items()):
            hyper = msgspec.structs.asdict(assignment.hyper)
            del hyper["step_options"]  # the same for all; the header has the plan
            values: dict[str, Any] = hyper | {name: getattr(assignment, name) for name in ("seed", "steps", "values")}
            yield DecisionRow(round=number, device=device, **values)


def reading_rows(run: RunRecord) -> Iterator[Sample]:
    """Yield a row for every reading, with its latest reported source and quality."""
    last_sources: dict[tuple[str, str], Provenance] = {}
    for record, second in _distinct_reports(run):
        for name, value in sorted(record.readings.items()):
            if name in record.provenance:
                last_sources[record.device, name] = record.provenance[name]
            provenance = last_sources.get((record.device, name), Provenance(source="", quality="measured"))
            yield Sample(
                at_s=second,
                device=record.device,
                name=name,
                value=value,
                unit=unit_of(name),
                age_s=record.ages.get(name),
                quality=provenance.quality,
                source=provenance.source,
            )


def fact_rows(run: RunRecord) -> Iterator[Fact]:
    """Yield a row for every reported fact."""
    for record, second in _distinct_reports(run):
        texts = {**record.facts, **({BOARD: record.board} if record.board else {})}
        for name, value in sorted(texts.items()):
            yield Fact(at_s=second, device=record.device, name=name, value=value)


def _distinct_reports(run: RunRecord) -> Iterator[tuple[Sensed, float]]:
    """Skip reports of the same device and microsecond as the one before."""
    last: dict[str, float] = {}
    for record, second in run.with_seconds(Sensed):
        if second is not None and last.get(record.device) != second:
            last[record.device] = second
            yield record, second


def presence_rows(run: RunRecord) -> Iterator[Presence]:
    """Yield a row for every change of presence; leaving within a working span interrupts that round's task."""
    before, spans = set[Presence](), _working_spans(run)
    for record, second in run.with_seconds(Joined, Left):
        if second is None or not isinstance(record, Joined | Left):
            continue
        is_birth = isinstance(record, Joined)
        at_work = [number for begin, end, number in spans.get(record.device, ()) if begin <= second < end]
        row = Presence(
            at_s=second,
            device=record.device,
            event="joined" if is_birth else "left",
            cause=record.cause,
            interrupts=at_work[-1] if at_work and not (is_birth and record.cause == "connected") else None,
            version=record.version if isinstance(record, Joined) else "",
        )
        if row not in before:
            yield row
        before = {row_ for row_ in before if row_.at_s == second} | {row}


def _working_spans(run: RunRecord) -> dict[str, list[tuple[float, float, int]]]:
    """Return (start, end, round) of every device's work: from the round's opening to its update or close."""
    spans: dict[str, list[tuple[float, float, int]]] = {}
    for number, opening in sorted(run.rounds.items()):
        closed = run.round_ends.get(number)
        for device in opening.record.assignments if opening.at_s is not None else ():
            accepted = run.updates.get((number, device))
            moments = (accepted.at_s if accepted else None, closed.at_s if closed else None)
            end_s = min((moment for moment in moments if moment is not None), default=float("inf"))
            spans.setdefault(device, []).append((opening.at_s or 0.0, end_s, number))
    return spans


def build_tables(run: RunRecord) -> dict[str, tuple[msgspec.Struct, ...]]:
    """Return the rows of a run by table of a trace."""
    return {
        "tasks": tuple(task_rows(run)),
        "steps": tuple(step_rows(run)),
        "rounds": tuple(round_rows(run)),
        "decisions": tuple(decision_rows(run)),
        "readings": tuple(reading_rows(run)),
        "facts": tuple(fact_rows(run)),
        "availability": tuple(presence_rows(run)),
    }
