"""Digest of a run from its journal.

With personal models, a run's accuracy, or other compared metric, is that of the devices' models, else that of the
aggregated model.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Required, TypedDict

import msgspec

from edge_server.journal.compared import compared_metric, device_value, devices_value, server_value
from edge_server.journal.compared_metric import ACCURACY, ComparedMetric
from edge_server.journal.costs import costs_by_round, statistics_by_round
from edge_server.journal.records import (
    AnyRecord,
    Evaluated,
    Joined,
    Left,
    Noted,
    Rewound,
    RoundClosed,
    RoundOpened,
    RunClosed,
    RunOpened,
    Sensed,
    ServerBegan,
    UpdateAccepted,
    closed_rounds,
    drop_void,
)
from edge_server.report.digest import (
    MOST_READINGS,
    NONE,
    Amount,
    DeviceDigest,
    Digest,
    Joules,
    RoundDigest,
    Seconds,
    SpentByRound,
    TaskDigest,
    TaskValue,
    Traffic,
    amount_or_unknown,
    cost_amount,
    remaining_seconds,
    share_or_none,
    sum_known,
    worst_quality,
)
from shared.errors import ConfigError
from shared.protocol.measurements import Cost
from shared.protocol.messages import Assignment, Update, Value

PERSONAL = frozenset(
    {
        *("fedalt", "fedmp", "fedselect", "fedsim", "fedspu", "fjord", "fjord_fixed", "hermes", "local_only"),
        *("prunefl", "pruned_personalization", "pruned_personalization_fedsim", "pruning_only", "random_dropout"),
    }
)
"""Algorithms with personal models, by name: asking the algorithms would load torch."""

PARTS = ("download", "compute", "exchange", "upload")
SPLIT_TRAFFIC = ("features_bytes", "gradient_bytes")
"""Traffic that only a split session has."""

MEASURING_ROUND = 0
DIGITS = re.compile("([0-9]{1,18})")


class ComparedFigures(TypedDict, total=False):
    """Accuracies, or values of another compared metric, of one round, by name in `RoundDigest`."""

    accuracy: Required[float | None]
    device_accuracy: Required[float | None]
    global_accuracy: float | None
    fleet_accuracy: float | None
    value: float | None
    device_value: float | None
    global_value: float | None
    fleet_value: float | None


def is_personal(records: Iterable[AnyRecord]) -> bool:
    """Return True if the devices of a run use personal models."""
    return any(
        record.plan.algorithm.name in PERSONAL if isinstance(record, RunOpened) else record.personal
        for record in records
        if isinstance(record, RunOpened | Evaluated)
    )


def evaluations_by_round(records: Sequence[AnyRecord]) -> dict[int, Evaluated]:
    """Return the fleet's evaluations by the round they followed; old journals do not record it."""
    return {
        record.round: record
        for record in drop_void(records)
        if isinstance(record, Evaluated) and record.round is not None
    }


def last_evaluation(records: Sequence[AnyRecord]) -> Evaluated:
    """Return the fleet's last evaluation; an empty one if there is none."""
    evaluations = [record for record in drop_void(records) if isinstance(record, Evaluated)]
    return evaluations[-1] if evaluations else Evaluated(accuracy=None, by_device={})


def figure_reader(records: Sequence[AnyRecord]) -> Callable[[RoundClosed], ComparedFigures]:
    """Return a function from a round's end to its figures; the fleet's stand in where the server tests nothing."""
    evaluations, uses_personal, metric = evaluations_by_round(records), is_personal(records), compared_metric(records)
    by_fleet = uses_personal or all(server_value(end, metric) is None for end in closed_rounds(records))

    def of_round(end: RoundClosed) -> ComparedFigures:
        fleet = devices_value(evaluations[end.round], metric) if end.round in evaluations else None
        server, on_devices = server_value(end, metric), devices_value(end, metric)
        if metric == ACCURACY:
            server, on_devices, fleet = map(share_or_none, (server, on_devices, fleet))
            return {
                "accuracy": fleet if by_fleet else server,
                "device_accuracy": on_devices,
                "global_accuracy": server if uses_personal else None,
                "fleet_accuracy": fleet,
            }
        server, on_devices, fleet = (amount_or_unknown(value).value for value in (server, on_devices, fleet))
        return {
            "accuracy": share_or_none(end.accuracy),
            "device_accuracy": share_or_none(end.device_accuracy),
            "value": fleet if by_fleet else server,
            "device_value": on_devices,
            "global_value": server if uses_personal else None,
            "fleet_value": fleet,
        }

    return of_round


def _value_or_unset(value: float | None, metric: ComparedMetric) -> float | msgspec.UnsetType | None:
    """Return a plausible value of a metric other than the accuracy."""
    return msgspec.UNSET if metric == ACCURACY else amount_or_unknown(value).value


def _other_metrics(end: RoundClosed, metric: ComparedMetric) -> dict[str, float] | msgspec.UnsetType:
    """Return the metrics on the server's test data besides the compared one."""
    metrics = {} if end.metrics is msgspec.UNSET else end.metrics
    return {name: value for name, value in sorted(metrics.items()) if name != metric.name} or msgspec.UNSET


class _Counts(TypedDict):
    """Number of tasks by arrival."""

    arrived: int
    late: int
    failed: int


def digest_run(records: Sequence[AnyRecord]) -> Digest:
    """Return the digest of a run; a round that has not ended is left out.

    Raises:
        ConfigError: The journal has no `RunOpened` record.
    """
    opening = next((record for record in records if isinstance(record, RunOpened)), None)
    if opening is None:
        raise ConfigError("the run's journal holds no beginning: nothing was recorded, or its first record is lost")
    closings = [record for record in records if isinstance(record, RunClosed)]
    closed = [record for record in drop_void(records) if isinstance(record, RoundClosed)]
    tasks = _tasks(records, closed)
    servers = [record for record in records if isinstance(record, ServerBegan)]
    metric, evaluated = compared_metric(records), last_evaluation(records)
    return Digest(
        run=opening.run,
        live=bool(opening.started),
        started=opening.started,
        outcome=closings[-1].outcome if closings else "unfinished",
        cause=closings[-1].cause if closings else "",
        versions=servers[-1].versions if servers else {},
        servers=len(servers),
        notes=[record.what for record in records if isinstance(record, Noted)],
        went_back=sum(isinstance(record, Rewound) and not record.missed for record in records),
        refused=dict(sorted(sum((Counter(end.refused) for end in closed), Counter[str]()).items())),
        device_accuracy=share_or_none(devices_value(evaluated, ACCURACY)),
        device_value=_value_or_unset(devices_value(evaluated, metric), metric),
        compared=msgspec.UNSET if metric == ACCURACY else metric,
        classes=_class_names(records, opening),
        personal=is_personal(records),
        measuring=sum_known(
            sum_known(_cost_parts(cost, "joules")) for cost in costs_by_round(records).get(MEASURING_ROUND, {}).values()
        ),
        plan=opening.plan,
        rounds=_rounds(records, closed, tasks),
        devices=_devices(records, closed, tasks),
        tasks=tasks,
    )


def _class_names(records: Iterable[AnyRecord], opening: RunOpened) -> list[str]:
    """Return the class names as devices reported them last, else the plan's."""
    class_names = [record.classes for record in records if isinstance(record, RoundOpened)]
    planned = opening.plan.data.classes if opening.plan.data else msgspec.UNSET
    return list(next((names for names in (*reversed(class_names), planned) if names is not msgspec.UNSET), ()))


def _terms(end: RoundClosed) -> dict[str, float]:
    terms = {} if end.terms is msgspec.UNSET else end.terms
    return {name: value for name in sorted(terms) if (value := amount_or_unknown(terms[name]).value) is not None}


def _class_shares(end: RoundClosed) -> list[float | None]:
    return [] if end.class_accuracy is msgspec.UNSET else [share_or_none(share) for share in end.class_accuracy]


def _tasks(records: Sequence[AnyRecord], closed: Iterable[RoundClosed]) -> list[TaskDigest]:
    costs, measured = costs_by_round(records), statistics_by_round(records)
    openings = {record.round: record for record in drop_void(records) if isinstance(record, RoundOpened)}
    updates = {
        (record.round, record.device): record.update
        for record in drop_void(records)
        if isinstance(record, UpdateAccepted)
    }
    return [
        _add_statistics(
            _task(end, device, assignment, costs.get(end.round, {}).get(device), updates.get((end.round, device))),
            end,
            measured.get(end.round, {}).get(device),
        )
        for end in closed
        if end.round in openings
        for device, assignment in sorted(openings[end.round].assignments.items())
    ]


def _add_statistics(task: TaskDigest, end: RoundClosed, cost: Cost | None) -> TaskDigest:
    """Return a task with the cost of re-measuring running statistics added, if its device took part."""
    if cost is None:
        return task
    seconds, joules = (_cost_parts(cost, unit, split=True) for unit in ("s", "joules"))
    in_all = sum_known(seconds)
    amounts = [getattr(task.seconds, part) for part in PARTS if getattr(task.seconds, part) != NONE]
    return msgspec.structs.replace(
        task,
        seconds=msgspec.structs.replace(
            task.seconds, statistics=in_all, waiting=remaining_seconds(end.seconds, [*amounts, in_all])
        ),
        joules=msgspec.structs.replace(
            task.joules,
            statistics=sum_known(joules),
            above_idle=sum_known([task.joules.above_idle, _above_idle(cost, seconds, joules)]),
        ),
        statistics_bytes=sum_known(cost_amount(cost, name) for name in ("bytes_down", "bytes_up", *SPLIT_TRAFFIC)),
    )


def _task(
    end: RoundClosed, device: str, assignment: Assignment, cost: Cost | None, update: Update | None
) -> TaskDigest:
    arrived, split = device in end.arrived, assignment.steps > 0
    seconds, joules = (_cost_parts(cost, unit, split=split) for unit in ("s", "joules"))
    return TaskDigest(
        round=end.round,
        device=device,
        arrival="arrived" if arrived else "failed" if device in end.failed else "late",
        cause=end.failed.get(device, ""),
        told=_task_values(assignment),
        examples=update.num_examples if update and arrived else None,
        loss=amount_or_unknown(update.loss).value if update and arrived else None,
        seconds=Seconds(**dict(zip(PARTS, seconds, strict=True)), waiting=remaining_seconds(end.seconds, seconds)),
        joules=Joules(**dict(zip(PARTS, joules, strict=True)), above_idle=_above_idle(cost, seconds, joules)),
        bytes_up=amount_or_unknown(end.bytes_up.get(device)),
        bytes_down=amount_or_unknown(end.bytes_down.get(device))
        if device in end.bytes_down
        else cost_amount(cost, "bytes_down"),
        **{name: cost_amount(cost, name) if split else NONE for name in SPLIT_TRAFFIC},
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
    match value:
        case str():
            return value
        case list():
            return float(len(value))
        case _:
            return float(value)


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


def _rounds(
    records: Sequence[AnyRecord], closed: Sequence[RoundClosed], tasks: Iterable[TaskDigest]
) -> list[RoundDigest]:
    online = {record.round: record.online for record in drop_void(records) if isinstance(record, RoundOpened)}
    figures_of, metric = figure_reader(records), compared_metric(records)
    by_number: dict[int, list[TaskDigest]] = {}
    for task in tasks:
        by_number.setdefault(task.round, []).append(task)
    digests: list[RoundDigest] = []
    until = SpentByRound(seconds=NONE, joules=NONE, bytes_up=NONE, bytes_down=NONE, bytes=NONE)
    for end in closed:
        round_tasks = by_number.get(end.round, [])
        energy, traffic = sum_known(sum_joules(task) for task in round_tasks), _sum_traffic(round_tasks)
        until = SpentByRound(
            seconds=sum_known([until.seconds, amount_or_unknown(end.seconds)]),
            joules=sum_known([until.joules, energy]),
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
                **figures_of(end),
                class_accuracy=_class_shares(end),
                test_loss=amount_or_unknown(end.test_loss).value,
                loss=amount_or_unknown(end.loss).value,
                metrics=_other_metrics(end, metric),
                terms=_terms(end),
                seconds=end.seconds,
                joules=energy,
                **traffic,
                until=until,
            )
        )
    return digests


def _sum_traffic(tasks: Sequence[TaskDigest]) -> dict[str, Amount]:
    return {name: sum_known(getattr(task, name) for task in tasks) for name in Traffic.__struct_fields__}


def _count_arrivals(tasks: Iterable[TaskDigest]) -> _Counts:
    counts = Counter(task.arrival for task in tasks)
    return {"arrived": counts["arrived"], "late": counts["late"], "failed": counts["failed"]}


def _highest_readings(records: Iterable[AnyRecord]) -> dict[str, dict[str, float]]:
    """Return the maximum of each of `MOST_READINGS` by device; a board without a GPU has no readings of one."""
    most: dict[str, dict[str, float]] = {}
    for record in records:
        if isinstance(record, Sensed):
            highest = most.setdefault(record.device, {})
            for name in MOST_READINGS:
                if name in record.readings:
                    highest[name] = max(record.readings[name], highest.get(name, record.readings[name]))
    return most


def _devices(
    records: Sequence[AnyRecord], closed: Iterable[RoundClosed], tasks: Iterable[TaskDigest]
) -> list[DeviceDigest]:
    lengths = {end.round: end.seconds for end in closed}
    boards = {record.device: record.board for record in records if isinstance(record, Sensed) and record.board}
    versions = {record.device: record.version for record in records if isinstance(record, Joined) and record.version}
    departures = Counter(record.device for record in records if isinstance(record, Left))
    most = _highest_readings(records)
    metric, by_last = compared_metric(records), last_evaluation(records).by_device
    by_device: dict[str, list[TaskDigest]] = {}
    for task in tasks:
        by_device.setdefault(task.device, []).append(task)
    return [
        DeviceDigest(
            device=device,
            board=boards.get(device, ""),
            version=versions.get(device, ""),
            went_away=departures[device],
            most=most.get(device, {}),
            selected=len(device_tasks),
            **_count_arrivals(device_tasks),
            rounds_s=math.fsum(lengths[task.round] for task in device_tasks),
            seconds=Seconds(**_sum_fields(task.seconds for task in device_tasks)),
            joules=Joules(**_sum_fields(task.joules for task in device_tasks)),
            **_sum_traffic(device_tasks),
            accuracy=share_or_none(device_value(by_last.get(device, {}), ACCURACY)),
            value=_value_or_unset(device_value(by_last.get(device, {}), metric), metric),
        )
        for device, device_tasks in sorted(by_device.items(), key=lambda pair: natural_order(pair[0]))
    ]


def natural_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders numbers by size, so that `pi-2` precedes `pi-10`."""
    return [(int(part), "") if index % 2 else (0, part) for index, part in enumerate(DIGITS.split(name))]


def _sum_fields(splits: Iterable[Seconds | Joules]) -> dict[str, Amount]:
    splits = list(splits)
    return {name: sum_known(getattr(split, name) for split in splits) for name in splits[0].__struct_fields__}
