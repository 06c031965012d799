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
from itertools import chain
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
    ValueOrUnset,
)
from shared.protocol.measurements import Cost
from shared.protocol.messages import Assignment, Update, Value

PARTS = ("download", "compute", "exchange", "upload")
MEASURING_ROUND = 0
TRAFFIC = Traffic.__struct_fields__
TASK_AMOUNTS = {
    name: attrgetter(name)
    for name in (
        *(f"seconds.{name}" for name in Seconds.__struct_fields__),
        *(f"joules.{name}" for name in Joules.__struct_fields__),
        *TRAFFIC,
    )
}
"""Getters of the amounts of a task, by name."""
DIGITS = re.compile("([0-9]{1,18})")


def digest_run(records: Sequence[AnyRecord]) -> Digest:
    """Return the digest of a run; a round that has not ended is left out.

    Raises:
        ConfigError: The journal has no `RunOpened` record.
    """
    run = RunRecord(records)
    rounds, tasks, sums = _RoundDigests(run), PackedRows(TaskDigest), defaultdict[str, _DeviceSums](_DeviceSums)
    for end, round_tasks in _tasks_by_round(run):
        tasks.extend(round_tasks)
        rounds.add(end, round_tasks)
        for task in round_tasks:
            sums[task.device].add(task, end.seconds)
    opening, closing, servers = run.opening, run.last_of(RunClosed), list(select(records, ServerBegan))
    evaluation, measuring = run.last_evaluation, run.costs.get(MEASURING_ROUND, {}).values()
    return Digest(
        run=opening.run,
        live=bool(opening.started),
        started=opening.started,
        outcome=closing.outcome if closing else "unfinished",
        cause=closing.cause if closing else "",
        versions=servers[-1].versions if servers else {},
        servers=len(servers),
        notes=[note.what for note in select(records, Noted)],
        went_back=sum(not record.missed for record in select(records, Rewound)),
        refused=dict(sorted(sum((Counter(end.refused) for end in run.ends), Counter[str]()).items())),
        device_accuracy=share_or_none(devices_value(evaluation, ACCURACY)),
        device_value=_value_or_unset(devices_value(evaluation, run.metric), run.metric),
        compared=msgspec.UNSET if run.metric == ACCURACY else run.metric,
        classes=_class_names(run),
        personal=rounds.personal,
        measuring=sum_known(sum_known(_cost_parts(cost, "joules")) for cost in measuring),
        plan=opening.plan,
        rounds=rounds.digests,
        devices=_devices(run, sums),
        tasks=tasks,
    )


def _value_or_unset(value: float | None, metric: ComparedMetric) -> ValueOrUnset:
    """Return a plausible value of a metric other than the accuracy."""
    return msgspec.UNSET if metric == ACCURACY else amount_or_unknown(value).value


def _class_names(run: RunRecord) -> list[str]:
    """Return the class names as devices reported them last, else the plan's."""
    openings = valid_records(run.records, RoundOpened, newest_first=True)
    planned = run.opening.plan.data.classes if run.opening.plan.data else msgspec.UNSET
    classes = chain((opening.classes for opening in openings), [planned])
    return list(next((names for names in classes if names is not msgspec.UNSET), ()))


def _tasks_by_round(run: RunRecord) -> Iterator[tuple[RoundClosed, list[TaskDigest]]]:
    """Yield each closed round with its tasks; one whose opening is lost has none."""
    openings, rounds = dict[int, RoundOpened](), run.opening.plan.rounds
    for record in valid_records(run.records, RoundOpened, RoundClosed):
        if isinstance(record, RoundOpened) and record.round <= rounds + 1:  # none of an evaluation, which never closes
            openings[record.round] = record
        elif isinstance(record, RoundClosed):
            opening = openings.pop(record.round, None)
            yield record, _round_tasks(run, opening, record) if opening else []


def _round_tasks(run: RunRecord, opening: RoundOpened, end: RoundClosed) -> list[TaskDigest]:
    costs, updates = run.costs.get(end.round, {}), run.costs.updates(end.round)
    statistics: Mapping[str, Cost] = {}
    if end.statistics_batches is not None:
        statistics = run.costs.get(run.opening.plan.rounds + 1 + end.round, {})
    return [
        _task(end, device, assignment, costs.get(device), updates.get(device), statistics.get(device))
        for device, assignment in sorted(opening.assignments.items())
    ]


def _task(
    end: RoundClosed,
    device: str,
    assignment: Assignment,
    cost: Cost | None,
    update: Update | None,
    statistics: Cost | None,
) -> TaskDigest:
    """Return a task; `statistics` is the cost of re-measuring running statistics if its device took part in that."""
    is_arrived, split = device in end.arrived, assignment.steps > 0
    update = update if is_arrived else None
    parts_s, parts_j = (_cost_parts(cost, unit, split=split) for unit in ("s", "joules"))
    above_idle = _above_idle(cost, parts_s, parts_j)
    seconds, joules = (dict(zip(PARTS, parts, strict=True)) for parts in (parts_s, parts_j))
    traffic = {
        name: cost_amount(cost, name) if split or name not in SPLIT_TRAFFIC else NONE
        for name in TRAFFIC
        if name != "statistics_bytes"
    }
    traffic["bytes_up"] = amount_or_unknown(end.bytes_up.get(device))
    if device in end.bytes_down:
        traffic["bytes_down"] = amount_or_unknown(end.bytes_down[device])
    if statistics is not None:
        parts_s, parts_j = (_cost_parts(statistics, unit, split=True) for unit in ("s", "joules"))
        seconds["statistics"], joules["statistics"] = sum_known(parts_s), sum_known(parts_j)
        above_idle = sum_known([above_idle, _above_idle(statistics, parts_s, parts_j)])
        names = ("bytes_down", "bytes_up", *SPLIT_TRAFFIC)
        traffic["statistics_bytes"] = sum_known(cost_amount(statistics, name) for name in names)
    return TaskDigest(
        round=end.round,
        device=device,
        arrival="arrived" if is_arrived else "failed" if device in end.failed else "late",
        cause=end.failed.get(device, ""),
        told=_task_values(assignment),
        examples=update.num_examples if update else None,
        loss=amount_or_unknown(update.loss).value if update else None,
        seconds=Seconds(**seconds, waiting=remaining_seconds(end.seconds, list(seconds.values()))),
        joules=Joules(**joules, above_idle=above_idle),
        **traffic,
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
    return {
        name: value if isinstance(value, str) else float(len(value) if isinstance(value, list) else value)
        for name, value in values.items()
    }


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


class _RoundDigests:
    """Digests of rounds, added in order."""

    def __init__(self, run: RunRecord) -> None:
        self._run, self.personal, self.digests = run, is_personal(run.records), list[RoundDigest]()
        self._by_fleet = self.personal or all(server_value(end, run.metric) is None for end in run.ends)
        self._online = {opening.round: opening.online for opening in valid_records(run.records, RoundOpened)}

    def add(self, end: RoundClosed, tasks: Sequence[TaskDigest]) -> None:
        """Add a round with its tasks."""
        joules, metric = sum_known(map(sum_joules, tasks)), self._run.metric.name
        traffic: dict[str, Any] = {name: sum_known(getattr(task, name) for task in tasks) for name in TRAFFIC}
        digest = RoundDigest(
            round=end.round,
            outcome=end.outcome,
            online=self._online.get(end.round),
            selected=len(tasks),
            **_count_arrivals(Counter(task.arrival for task in tasks)),
            **self._compared_figures(end),
            class_accuracy=[share_or_none(share) for share in end.class_accuracy or ()],
            test_loss=amount_or_unknown(end.test_loss).value,
            loss=amount_or_unknown(end.loss).value,
            metrics={k: v for k, v in _sort_figures(end.metrics) if k != metric} or msgspec.UNSET,
            terms={k: v for k, v in _sort_figures(end.terms) if amount_or_unknown(v).value is not None},
            seconds=end.seconds,
            joules=joules,
            **traffic,
            until=self._sum_spending(amount_or_unknown(end.seconds), joules, traffic),
        )
        self.digests.append(digest)

    def _sum_spending(self, seconds: Amount, joules: Amount, traffic: Mapping[str, Amount]) -> SpentByRound:
        """Return the spending by the end of the next round."""
        sums = {"seconds": [seconds], "joules": [joules], "bytes": list(traffic.values())}
        sums |= {name: [amount] for name, amount in traffic.items()}
        before = self.digests[-1].until if self.digests else None
        return SpentByRound(
            **{name: sum_known([getattr(before, name, NONE), *amounts]) for name, amounts in sums.items()}
        )

    def _compared_figures(self, end: RoundClosed) -> dict[str, Any]:
        """Return the fields of `RoundDigest` for the compared metric; the fleet stands in for the server."""
        metric, server = self._run.metric, server_value(end, self._run.metric)
        values = {"device": devices_value(end, metric), "fleet": self._run.fleet_value(end.round)}
        if metric == ACCURACY:
            name, clean = "accuracy", share_or_none
        else:
            name, clean = "value", lambda value: amount_or_unknown(value).value
        figures = {f"{scope}_{name}": clean(value) for scope, value in values.items()}
        figures[f"global_{name}"] = clean(server) if self.personal else None
        figures[name] = figures[f"fleet_{name}"] if self._by_fleet else clean(server)
        accuracies = {"accuracy": share_or_none(end.accuracy), "device_accuracy": share_or_none(end.device_accuracy)}
        return accuracies | figures


def _sort_figures(figures: Mapping[str, float] | msgspec.UnsetType) -> list[tuple[str, float]]:
    return sorted(figures.items()) if figures else []


def _count_arrivals(counts: Mapping[str, int]) -> dict[str, Any]:
    return {arrival: counts.get(arrival, 0) for arrival in ARRIVALS}


class _DeviceSums:
    """Sums over a device's tasks."""

    def __init__(self) -> None:
        self.arrivals, self.rounds_s = Counter[str](), array("d")
        self._amounts = defaultdict[str, AmountSum](AmountSum)

    def add(self, task: TaskDigest, round_s: float) -> None:
        """Add a task of a round of so many seconds."""
        self.arrivals[task.arrival] += 1
        self.rounds_s.append(round_s)
        for name, read in TASK_AMOUNTS.items():
            self._amounts[name].add(read(task))

    def totals(self, names: Iterable[str], prefix: str = "") -> dict[str, Any]:
        """Return the sums of amounts."""
        return {name: self._amounts[f"{prefix}{name}"].total() for name in names}


def _devices(run: RunRecord, sums: Mapping[str, _DeviceSums]) -> list[DeviceDigest]:
    boards, most = dict[str, str](), defaultdict[str, dict[str, float]](dict)
    for record in select(run.records, Sensed):
        boards |= {record.device: record.board} if record.board else {}
        highest = most[record.device]
        for name in record.readings.keys() & MOST_READINGS:
            highest[name] = max(record.readings[name], highest.get(name, record.readings[name]))
    versions = {record.device: record.version for record in select(run.records, Joined) if record.version}
    departures = Counter(record.device for record in select(run.records, Left))
    digests = []
    for device in sorted(sums, key=natural_order):
        of_device, metrics = sums[device], run.last_evaluation.by_device.get(device, {})
        digests.append(
            DeviceDigest(
                device=device,
                board=boards.get(device, ""),
                version=versions.get(device, ""),
                went_away=departures[device],
                most={name: most[device][name] for name in MOST_READINGS if name in most[device]},
                selected=of_device.arrivals.total(),
                rounds_s=math.fsum(of_device.rounds_s),
                seconds=Seconds(**of_device.totals(Seconds.__struct_fields__, "seconds.")),
                joules=Joules(**of_device.totals(Joules.__struct_fields__, "joules.")),
                **_count_arrivals(of_device.arrivals),
                **of_device.totals(TRAFFIC),
                accuracy=share_or_none(device_value(metrics, ACCURACY)),
                value=_value_or_unset(device_value(metrics, run.metric), run.metric),
            )
        )
    return digests


def natural_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders numbers by size, so that `pi-2` precedes `pi-10`."""
    return [(int(part), "") if index % 2 else (0, part) for index, part in enumerate(DIGITS.split(name))]
