"""Import a trace as a run's journal.

All times are seconds of the run; every server process starts where its clock would show that second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from edge_server.journal.records import (
    AnyRecord,
    CostSettled,
    Evaluated,
    Joined,
    Left,
    Measured,
    Noted,
    Rewound,
    RoundClosed,
    RoundOpened,
    RunClosed,
    RunOpened,
    Sensed,
    ServerBegan,
    UpdateAccepted,
)
from edge_server.plan.plan import Plan
from edge_server.record.build import BOARD
from edge_server.record.rows import DecisionRow, Fact, Round, Sample, TaskRow, common_fields
from edge_server.replay.trace.trace import Trace
from shared.errors import ConfigError
from shared.protocol.measurements import Cost, Provenance, StepCost
from shared.protocol.messages import Assignment, Hyper, SgdOptions, Transfer, Update

# Parts of a cost that are not known yet when the update is sent.
LATER = ("upload_s", "upload_joules", "bytes_up")
# Fields of a round's end that the header has by round.
BY_ROUND = ("class_accuracy", "terms", "metrics", "device_metrics")


def to_records(trace: Trace, run: str = "") -> list[AnyRecord]:
    """Return the journal of a trace.

    Args:
        run: New name of the run; empty to keep it.
    """
    header = trace.header
    opening = RunOpened(imported=True, **common_fields(header, RunOpened) | {"run": run or header.run})
    begun: list[AnyRecord] = [
        ServerBegan(at=process.run_s, **common_fields(process, ServerBegan)) for process in header.processes
    ]
    begun += [Rewound(**common_fields(rewind, Rewound)) for rewind in header.rewound]
    ended: list[AnyRecord] = [Noted(what=note) for note in header.notes]
    if header.ended:
        ended.append(RunClosed(**common_fields(header.ended, RunClosed)))
    return [opening, *begun, *_sort_by_time(trace), *ended]


def _sort_by_time(trace: Trace) -> list[AnyRecord]:
    """Return all records in order of time; records without a time follow their predecessor."""
    timed: list[tuple[float, int, AnyRecord]] = []
    for source in (_presence_records(trace), _sensed_records(trace), _round_records(trace)):
        last_s = 0.0
        for record in source:
            last_s = max(last_s, getattr(record, "at", None) or 0.0)
            timed.append((last_s, len(timed), record))
    return [record for _, _, record in sorted(timed, key=lambda event: event[:2])]


def _presence_records(trace: Trace) -> Iterator[AnyRecord]:
    for row in trace.presence:
        kind = Left if row.cause in ("gone", "unheard") else Joined
        yield kind(at=row.at_s, **common_fields(row, kind))


def _sensed_records(trace: Trace) -> Iterator[AnyRecord]:
    samples: defaultdict[tuple[float, str], list[Sample]] = defaultdict(list)
    facts: defaultdict[tuple[float, str], list[Fact]] = defaultdict(list)
    for sample in trace.readings:
        samples[sample.at_s, sample.device].append(sample)
    for fact in trace.facts:
        facts[fact.at_s, fact.device].append(fact)
    last_sources: dict[tuple[str, str], Provenance] = {}
    order = {key: place for place, key in enumerate([*samples, *facts])}
    for key in sorted(samples.keys() | facts.keys(), key=lambda item: (item[0], order[item])):
        at_s, device = key
        sources = {
            sample.name: Provenance(source=sample.source, quality=sample.quality) for sample in samples.get(key, ())
        }
        news = {name: source for name, source in sources.items() if last_sources.get((device, name)) != source}
        last_sources |= {(device, name): source for name, source in news.items()}
        texts = {fact.name: fact.value for fact in facts.get(key, ())}
        yield Sensed(
            device=device,
            at=at_s,
            readings={sample.name: sample.value for sample in samples.get(key, ())},
            ages={sample.name: sample.age_s for sample in samples.get(key, ()) if sample.age_s is not None},
            provenance=news,
            board=texts.pop(BOARD, ""),
            facts=texts,
        )


def _round_records(trace: Trace) -> Iterator[AnyRecord]:
    tasks: defaultdict[int, list[TaskRow]] = defaultdict(list)
    assignments: defaultdict[int, dict[str, Assignment]] = defaultdict(dict)
    for task in trace.tasks:
        tasks[task.round].append(task)
    for decision in trace.decisions:
        assignments[decision.round][decision.device] = _assignment(decision, trace.header.plan)
    run, last = trace.header.run, trace.header.plan.rounds
    statistics = {entry.round: entry.batches for entry in trace.header.statistics}
    yield from _update_records(run, tasks[0])
    if trace.header.measured:
        yield Measured(
            by_device={step.device: StepCost(**common_fields(step, StepCost)) for step in trace.steps},
            metrics={task.device: task.metrics for task in tasks[0] if task.metrics},
            failed={task.device: task.cause for task in tasks[0] if task.outcome == "failed"},
        )
    yield from _evaluation_records(trace, 0, tasks)
    for row in trace.rounds:
        if row.asked or row.outcome == "open" or row.opened_s is not None:
            fields = common_fields(row, RoundOpened)
            yield RoundOpened(at=row.opened_s, assignments=assignments[row.round], **fields)
        yield from _update_records(run, tasks[row.round])
        yield from _update_records(run, [task for task in tasks[last + 1 + row.round] if task.purpose == "statistics"])
        if row.outcome != "open":
            closed = _closing_record(row, tasks[row.round], statistics.get(row.round))
            tables = {name: getattr(trace.header, name) or {} for name in BY_ROUND}
            figures = {name: by_round.get(row.round, msgspec.UNSET) for name, by_round in tables.items()}
            yield msgspec.structs.replace(closed, **figures)
        yield from _evaluation_records(trace, row.round, tasks)
    after = [task for number in sorted(tasks) if number > last for task in tasks[number]]
    if trace.header.evaluated and not trace.header.evaluations:  # old traces only have the final evaluation
        yield from _update_records(run, after)
        yield Evaluated(accuracy=trace.header.device_accuracy, by_device=_measurements(after))


def _evaluation_records(trace: Trace, after: int, tasks: Mapping[int, list[TaskRow]]) -> Iterator[AnyRecord]:
    """Yield the evaluations by all devices after a round."""
    header = trace.header
    for evaluation in header.evaluations:
        if evaluation.round == after:
            evaluation_tasks = tasks.get(header.plan.evaluation.number(header.plan.rounds, after), [])
            yield from _update_records(header.run, evaluation_tasks)
            yield Evaluated(by_device=_measurements(evaluation_tasks), **common_fields(evaluation, Evaluated))


def _measurements(tasks: Iterable[TaskRow]) -> dict[str, dict[str, float]]:
    return {task.device: task.metrics for task in tasks if task.outcome == "arrived"}


def _assignment(row: DecisionRow, plan: Plan) -> Assignment:
    """Return a recorded assignment; options of the training step are those of the plan, which all rounds share."""
    options = {name: getattr(row, name) for name in SgdOptions.__struct_fields__}
    try:
        hyper = Hyper(**options, step_options=plan.hyper_of(row.round).step_options)
    except ValueError as error:
        place = f"decisions.csv: round {row.round}, device {row.device}"
        raise ConfigError(f"{place}: {error}; correct or restore that line") from error
    return Assignment(seed=row.seed, hyper=hyper, steps=row.steps, values=row.values)


def _closing_record(row: Round, tasks: list[TaskRow], statistics_batches: int | None) -> RoundClosed:
    assert row.outcome != "open"
    arrived = [task for task in tasks if task.outcome == "arrived"]
    fields = common_fields(row, RoundClosed) | {"seconds": row.seconds or 0.0}
    fields |= {
        "arrived": tuple(task.device for task in arrived),
        "failed": {task.device: task.cause for task in tasks if task.outcome == "failed"},
        "bytes_up": {task.device: task.arrived_bytes for task in arrived if task.arrived_bytes is not None},
        "bytes_down": {task.device: task.bytes_down for task in arrived if task.bytes_down is not None},
        "missed": {task.device: task.missed_steps for task in tasks if task.missed_steps},
    }
    return RoundClosed(at=row.closed_s, statistics_batches=statistics_batches, **fields)


def _update_records(run: str, tasks: Iterable[TaskRow]) -> Iterator[AnyRecord]:
    for task in tasks:
        provenance = {name: origin for name, origin in task.provenance.items() if name in Cost.__struct_fields__}
        cost = Cost(**common_fields(task, Cost) | {"provenance": provenance})
        if task.outcome == "arrived":
            update = _update(run, task, _cost_in_update(cost) if task.settled else cost)
            size = task.arrived_bytes or 0
            yield UpdateAccepted(round=task.round, device=task.device, update=update, bytes_up=size, at=task.arrived_s)
        if task.outcome == "late" or (task.outcome == "arrived" and task.settled):
            yield CostSettled(round=task.round, device=task.device, cost=cost)


def _cost_in_update(cost: Cost) -> Cost:
    """Return the cost as it was known when the update was sent."""
    provenance = {name: entry for name, entry in cost.provenance.items() if name not in LATER}
    return msgspec.structs.replace(cost, **dict.fromkeys(LATER), provenance=provenance)


def _update(run: str, task: TaskRow, cost: Cost) -> Update:
    params = None
    if task.payload_bytes is not None:
        digest = bytes.fromhex(task.payload_digest)
        params = Transfer(digest=digest, size=task.payload_bytes, frame_bytes=task.frame_bytes or 0)
    fields = common_fields(task, Update) | {"run": run, "params": params, "cost": cost}
    return Update(start=bytes.fromhex(task.start_digest), num_examples=task.examples or 0, **fields)
