"""Digest of a run: sums over its record.

With personal models, a run's accuracy, or other compared metric, is that of the devices' models, else that of the
aggregated model.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from operator import attrgetter
from typing import Any

import msgspec

from edge_server.journal.compared import device_value, devices_value, is_personal, server_value
from edge_server.journal.compared_metric import ACCURACY, ComparedMetric
from edge_server.journal.records import (
    AnyRecord,
    Joined,
    Left,
    Noted,
    Rewound,
    RoundClosed,
    RoundOpened,
    RunClosed,
    Sensed,
    ServerBegan,
    select,
    valid_records,
)
from edge_server.record.amounts import (
    NONE,
    Amount,
    AmountSum,
    amount_or_unknown,
    cost_amount,
    remaining_seconds,
    share_or_none,
    sum_known,
    worst_quality,
)
from edge_server.record.index import RunRecord
from edge_server.record.packed import PackedRows
from edge_server.report.digest import (
    ARRIVALS,
    MOST_READINGS,
    SPLIT_TRAFFIC,
    DeviceDigest,
    Digest,
    Joules,
    RoundDigest,
    Seconds,
    SpentByRound,
    TaskDigest,
    TaskValue,
    Traffic,
)
from shared.protocol.measurements import Cost
from shared.protocol.messages import Assignment, Update, Value

PARTS = ("download", "compute", "exchange", "upload")
MEASURING_ROUND = 0
TASK_AMOUNTS = {
    name: attrgetter(name)
    for name in (
        *(f"seconds.{name}" for name in Seconds.__struct_fields__),
        *(f"joules.{name}" for name in Joules.__struct_fields__),
        *Traffic.__struct_fields__,
    )
}
"""Getters of the amounts of a task, by name."""
DIGITS = re.compile("([0-9]{1,18})")


def digest_run(records: Sequence[AnyRecord]) -> Digest:
    """Return the digest of a run; a round that has not ended is left out.

    Raises:
        ConfigError: The journal has no `RunOpened` record.
    """
    return digest_record(RunRecord(records))


def digest_record(run: RunRecord) -> Digest:
    """Return the digest of a run; a round that has not ended is left out."""
    tasks, opening, evaluation = PackedRows(_tasks(run), TaskDigest), run.opening, run.last_evaluation
    closing, servers = run.last_of(RunClosed), list(select(run.records, ServerBegan))
    measuring = run.costs.get(MEASURING_ROUND, {}).values()
    return Digest(
        run=opening.run,
        live=bool(opening.started),
        started=opening.started,
        outcome=closing.outcome if closing else "unfinished",
        cause=closing.cause if closing else "",
        versions=servers[-1].versions if servers else {},
        servers=len(servers),
        notes=[note.what for note in select(run.records, Noted)],
        went_back=sum(not record.missed for record in select(run.records, Rewound)),
        refused=dict(sorted(sum((Counter(end.refused) for end in run.ends), Counter[str]()).items())),
        device_accuracy=share_or_none(devices_value(evaluation, ACCURACY)),
        device_value=_value_or_unset(devices_value(evaluation, run.metric), run.metric),
        compared=msgspec.UNSET if run.metric == ACCURACY else run.metric,
        classes=_class_names(run),
        personal=is_personal(run.records),
        measuring=sum_known(sum_known(_cost_parts(cost, "joules")) for cost in measuring),
        plan=opening.plan,
        rounds=_rounds(run, tasks),
        devices=_devices(run, tasks),
        tasks=tasks,
    )


def _value_or_unset(value: float | None, metric: ComparedMetric) -> float | msgspec.UnsetType | None:
    """Return a plausible value of a metric other than the accuracy."""
    return msgspec.UNSET if metric == ACCURACY else amount_or_unknown(value).value


def _class_names(run: RunRecord) -> list[str]:
    """Return the class names as devices reported them last, else the plan's."""
    openings = valid_records(run.records, RoundOpened, newest_first=True)
    planned = run.opening.plan.data.classes if run.opening.plan.data else msgspec.UNSET
    classes = (names for names in chain((opening.classes for opening in openings), [planned]))
    return list(next((names for names in classes if names is not msgspec.UNSET), ()))


def _tasks(run: RunRecord) -> Iterator[TaskDigest]:
    """Yield the tasks of closed rounds."""
    openings, rounds = dict[int, RoundOpened](), run.opening.plan.rounds
    for record in valid_records(run.records, RoundOpened, RoundClosed):
        if isinstance(record, RoundOpened) and record.round <= rounds + 1:  # none of an evaluation, which never closes
            openings[record.round] = record
        elif isinstance(record, RoundClosed) and (opening := openings.pop(record.round, None)):
            yield from _round_tasks(run, opening, record)


def _round_tasks(run: RunRecord, opening: RoundOpened, end: RoundClosed) -> Iterator[TaskDigest]:
    costs, updates = run.costs.get(end.round, {}), run.costs.updates(end.round)
    statistics: Mapping[str, Cost] = {}
    if end.statistics_batches is not None:
        statistics = run.costs.get(run.opening.plan.rounds + 1 + end.round, {})
    for device, assignment in sorted(opening.assignments.items()):
        task = _task(end, device, assignment, costs.get(device), updates.get(device))
        yield _add_statistics(task, end, statistics.get(device))


def _task(
    end: RoundClosed, device: str, assignment: Assignment, cost: Cost | None, update: Update | None
) -> TaskDigest:
    is_arrived, split = device in end.arrived, assignment.steps > 0
    update = update if is_arrived else None
    seconds, joules = (_cost_parts(cost, unit, split=split) for unit in ("s", "joules"))
    traffic = {
        name: cost_amount(cost, name) if split or name not in SPLIT_TRAFFIC else NONE
        for name in Traffic.__struct_fields__
        if name != "statistics_bytes"
    }
    traffic["bytes_up"] = amount_or_unknown(end.bytes_up.get(device))
    if device in end.bytes_down:
        traffic["bytes_down"] = amount_or_unknown(end.bytes_down[device])
    return TaskDigest(
        round=end.round,
        device=device,
        arrival="arrived" if is_arrived else "failed" if device in end.failed else "late",
        cause=end.failed.get(device, ""),
        told=_task_values(assignment),
        examples=update.num_examples if update else None,
        loss=amount_or_unknown(update.loss).value if update else None,
        seconds=Seconds(**dict(zip(PARTS, seconds, strict=True)), waiting=remaining_seconds(end.seconds, seconds)),
        joules=Joules(**dict(zip(PARTS, joules, strict=True)), above_idle=_above_idle(cost, seconds, joules)),
        **traffic,
    )


def _add_statistics(task: TaskDigest, end: RoundClosed, cost: Cost | None) -> TaskDigest:
    """Return a task with the cost of re-measuring running statistics added, if its device took part."""
    if cost is None:
        return task
    seconds, joules = (_cost_parts(cost, unit, split=True) for unit in ("s", "joules"))
    in_all = sum_known(seconds)
    amounts = [amount for part in PARTS if (amount := getattr(task.seconds, part)) != NONE]
    waiting = remaining_seconds(end.seconds, [*amounts, in_all])
    above_idle = sum_known([task.joules.above_idle, _above_idle(cost, seconds, joules)])
    replace = msgspec.structs.replace
    return replace(
        task,
        seconds=replace(task.seconds, statistics=in_all, waiting=waiting),
        joules=replace(task.joules, statistics=sum_known(joules), above_idle=above_idle),
        statistics_bytes=sum_known(cost_amount(cost, name) for name in ("bytes_down", "bytes_up", *SPLIT_TRAFFIC)),
    )


def _cost_parts(cost: Cost | None, unit: str, *, split: bool = False) -> list[Amount]:
    """Return a cost in one unit by `PARTS`; without a split session there is no exchange."""
    return [cost_amount(cost, f"{part}_{unit}") if split or part != "exchange" else NONE for part in PARTS]


def _task_values(assignment: Assignment) -> dict[str, TaskValue]:
    """Return an assignment's hyperparameters and values as numbers and strings."""
    hyper = msgspec.structs.asdict(assignment.hyper)
    if options := hyper.pop("step_options"):
        hyper |= msgspec.to_builtins(options)
    values: dict[str, Value] = {**hyper, **assignment.values}
    return {name: _task_value(value) for name, value in values.items()}


def _task_value(value: Value) -> TaskValue:
    return value if isinstance(value, str) else float(len(value)) if isinstance(value, list) else float(value)


def _above_idle(cost: Cost | None, seconds: Sequence[Amount], joules: Sequence[Amount]) -> Amount:
    """Return the joules of a task above idle, J - idle_w * s, over the parts whose time and energy are known."""
    idle = cost_amount(cost, "idle_w")
    amounts = []
    for second, joule in zip(seconds, joules, strict=True):
        if second == joule == NONE:
            continue
        if idle.value is None or second.value is None or joule.value is None:
            amounts.append(Amount(whole=False))
        else:
            quality = worst_quality([idle.quality, second.quality, joule.quality])
            amounts.append(Amount(value=joule.value - idle.value * second.value, quality=quality))
    return sum_known(amounts)


def sum_joules(task: TaskDigest | DeviceDigest) -> Amount:
    """Return the total joules of a task or a device."""
    return sum_known(getattr(task.joules, part) for part in (*PARTS, "statistics"))


def _rounds(run: RunRecord, tasks: Iterable[TaskDigest]) -> list[RoundDigest]:
    online = {opening.round: opening.online for opening in valid_records(run.records, RoundOpened)}
    by_number = groupby(tasks, key=attrgetter("round"))
    number, group = next(by_number, (0, iter(())))
    personal = is_personal(run.records)
    by_fleet = personal or all(server_value(end, run.metric) is None for end in run.ends)
    digests: list[RoundDigest] = []
    until = SpentByRound(seconds=NONE, joules=NONE, bytes_up=NONE, bytes_down=NONE, bytes=NONE)
    for end in run.ends:
        round_tasks = list[TaskDigest]()
        if number == end.round:
            round_tasks = list(group)
            number, group = next(by_number, (0, iter(())))
        joules, traffic = sum_known(sum_joules(task) for task in round_tasks), _sum_traffic(round_tasks)
        until = SpentByRound(
            seconds=sum_known([until.seconds, amount_or_unknown(end.seconds)]),
            joules=sum_known([until.joules, joules]),
            bytes=sum_known([until.bytes, *traffic.values()]),
            **{name: sum_known([getattr(until, name), amount]) for name, amount in traffic.items()},
        )
        digests.append(
            RoundDigest(
                round=end.round,
                outcome=end.outcome,
                online=online.get(end.round),
                selected=len(round_tasks),
                **_count_arrivals(round_tasks),
                **_compared_figures(run, end, by_fleet=by_fleet, personal=personal),
                class_accuracy=[share_or_none(share) for share in end.class_accuracy or ()],
                test_loss=amount_or_unknown(end.test_loss).value,
                loss=amount_or_unknown(end.loss).value,
                metrics={k: v for k, v in _sort_figures(end.metrics) if k != run.metric.name} or msgspec.UNSET,
                terms={k: v for k, v in _sort_figures(end.terms) if amount_or_unknown(v).value is not None},
                seconds=end.seconds,
                joules=joules,
                **traffic,
                until=until,
            )
        )
    return digests


def _sort_figures(figures: Mapping[str, float] | msgspec.UnsetType) -> list[tuple[str, float]]:
    return sorted(figures.items()) if figures else []


def _compared_figures(run: RunRecord, end: RoundClosed, *, by_fleet: bool, personal: bool) -> dict[str, Any]:
    """Return the fields of `RoundDigest` for the compared metric; the fleet stands in for the server."""
    values = {"device": devices_value(end, run.metric), "fleet": run.fleet_value(end.round)}
    server = server_value(end, run.metric)
    if run.metric == ACCURACY:
        name, clean = "accuracy", share_or_none
    else:
        name, clean = "value", lambda value: amount_or_unknown(value).value
    figures = {f"{scope}_{name}": clean(value) for scope, value in values.items()}
    figures[f"global_{name}"] = clean(server) if personal else None
    figures[name] = figures[f"fleet_{name}"] if by_fleet else clean(server)
    accuracies = {"accuracy": share_or_none(end.accuracy), "device_accuracy": share_or_none(end.device_accuracy)}
    return accuracies | figures


def _sum_traffic(tasks: Sequence[TaskDigest]) -> dict[str, Any]:
    return {name: sum_known(getattr(task, name) for task in tasks) for name in Traffic.__struct_fields__}


def _count_arrivals(tasks: Iterable[TaskDigest]) -> dict[str, Any]:
    counts = Counter(task.arrival for task in tasks)
    return {arrival: counts[arrival] for arrival in ARRIVALS}


def _devices(run: RunRecord, tasks: Iterable[TaskDigest]) -> list[DeviceDigest]:
    boards = {record.device: record.board for record in select(run.records, Sensed) if record.board}
    versions = {record.device: record.version for record in select(run.records, Joined) if record.version}
    departures = Counter(record.device for record in select(run.records, Left))
    most, by_device = _highest_readings(run), defaultdict[str, _DeviceSums](_DeviceSums)
    lengths = {end.round: end.seconds for end in run.ends}
    for task in tasks:
        by_device[task.device].add(task, lengths[task.round])
    digests = []
    for device in sorted(by_device, key=natural_order):
        sums, metrics = by_device[device], run.last_evaluation.by_device.get(device, {})
        digests.append(
            DeviceDigest(
                device=device,
                board=boards.get(device, ""),
                version=versions.get(device, ""),
                went_away=departures[device],
                most=most.get(device, {}),
                selected=sums.arrivals.total(),
                rounds_s=math.fsum(sums.rounds_s),
                **sums.fields(),
                accuracy=share_or_none(device_value(metrics, ACCURACY)),
                value=_value_or_unset(device_value(metrics, run.metric), run.metric),
            )
        )
    return digests


class _DeviceSums:
    """Sums over a device's tasks."""

    def __init__(self) -> None:
        self.arrivals, self.rounds_s = Counter[str](), array("d")
        self.amounts = defaultdict[str, AmountSum](AmountSum)

    def add(self, task: TaskDigest, round_s: float) -> None:
        """Add a task of a round of so many seconds."""
        self.arrivals[task.arrival] += 1
        self.rounds_s.append(round_s)
        for name, read in TASK_AMOUNTS.items():
            self.amounts[name].add(read(task))

    def fields(self) -> dict[str, Any]:
        """Return the fields of `DeviceDigest` that are sums."""
        totals = {name: amounts.total() for name, amounts in self.amounts.items()}
        seconds = Seconds(**{name: totals[f"seconds.{name}"] for name in Seconds.__struct_fields__})
        joules = Joules(**{name: totals[f"joules.{name}"] for name in Joules.__struct_fields__})
        counts = {str(arrival): self.arrivals[arrival] for arrival in ARRIVALS}
        traffic = {name: totals[name] for name in Traffic.__struct_fields__}
        return {"seconds": seconds, "joules": joules, **counts, **traffic}


def _highest_readings(run: RunRecord) -> dict[str, dict[str, float]]:
    """Return the maximum of each of `MOST_READINGS` by device; a board without a GPU has no readings of one."""
    most: dict[str, dict[str, float]] = {}
    for record in select(run.records, Sensed):
        highest = most.setdefault(record.device, {})
        for name in record.readings.keys() & MOST_READINGS:
            highest[name] = max(record.readings[name], highest.get(name, record.readings[name]))
    return {
        device: {name: highest[name] for name in MOST_READINGS if name in highest} for device, highest in most.items()
    }


def natural_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders numbers by size, so that `pi-2` precedes `pi-10`."""
    return [(int(part), "") if index % 2 else (0, part) for index, part in enumerate(DIGITS.split(name))]
