"""From a run's journal to its digest.

Which accuracy is a run's own: of the aggregated model or, where devices use models of their own, of these.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypedDict

import msgspec

from edge_server.journal.costs import by_round, statistics_by_round
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
    valid,
)
from edge_server.report.digest import (
    MOST_READINGS,
    NONE,
    Amount,
    DeviceDigest,
    Digest,
    Joules,
    Moved,
    RoundDigest,
    Seconds,
    SpentByRound,
    TaskDigest,
    Told,
    figure,
    known_amount,
    largest_known,
    remaining_seconds,
    share_or_none,
    sum_known,
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
"""Methods whose devices use models of their own, by name: to ask the methods themselves would load torch."""

PARTS = ("download", "compute", "exchange", "upload")
CUT = ("features_bytes", "gradient_bytes")
"""What only a split session moves."""

MEASURING = 0
NUMBER = re.compile("([0-9]{1,18})")


class Accuracies(TypedDict):
    """Of one round, by name in `RoundDigest`."""

    accuracy: float | None
    global_accuracy: float | None
    fleet_accuracy: float | None


def is_personal(records: Iterable[AnyRecord]) -> bool:
    """Tell whether the devices of a run use models of their own."""
    return any(
        record.plan.algorithm.name in PERSONAL if isinstance(record, RunOpened) else record.personal
        for record in records
        if isinstance(record, RunOpened | Evaluated)
    )


def evaluations_by_round(records: Iterable[AnyRecord]) -> dict[int, Evaluated]:
    """Return what all devices measured, by the round after which they did; old journals do not say."""
    return {one.round: one for one in valid(records) if isinstance(one, Evaluated) and one.round is not None}


def last_evaluation(records: Iterable[AnyRecord]) -> Evaluated:
    """Return what all devices measured last; nothing where they did not."""
    found = [one for one in valid(records) if isinstance(one, Evaluated)]
    return found[-1] if found else Evaluated(accuracy=None, by_device={})


def of_rounds(records: Sequence[AnyRecord]) -> Callable[[RoundClosed], Accuracies]:
    """Return what tells a round's accuracies; where the server tests nothing, the devices' data stand for its own."""
    tried, personal = evaluations_by_round(records), is_personal(records)
    by_fleet = personal or all(one.accuracy is None for one in closed_rounds(records))

    def of_round(end: RoundClosed) -> Accuracies:
        fleet = share_or_none(tried[end.round].accuracy) if end.round in tried else None
        return {
            "accuracy": fleet if by_fleet else share_or_none(end.accuracy),
            "global_accuracy": share_or_none(end.accuracy) if personal else None,
            "fleet_accuracy": fleet,
        }

    return of_round


class _Counts(TypedDict):
    """How many tasks ended how."""

    arrived: int
    late: int
    failed: int


def digest_run(records: Sequence[AnyRecord]) -> Digest:
    """Return what a run came to; a round that has not ended does not count yet.

    Raises:
        ConfigError: The journal does not say what run it is of.
    """
    opened = next((one for one in records if isinstance(one, RunOpened)), None)
    if opened is None:
        raise ConfigError("the run's journal holds no beginning: nothing was recorded, or its first record is lost")
    ended = [one for one in records if isinstance(one, RunClosed)]
    closed = [one for one in valid(records) if isinstance(one, RoundClosed)]
    tasks = _tasks(records, closed)
    servers = [one for one in records if isinstance(one, ServerBegan)]
    return Digest(
        run=opened.run,
        live=bool(opened.started),
        started=opened.started,
        outcome=ended[-1].outcome if ended else "unfinished",
        cause=ended[-1].cause if ended else "",
        versions=servers[-1].versions if servers else {},
        servers=len(servers),
        notes=[one.what for one in records if isinstance(one, Noted)],
        went_back=sum(isinstance(one, Rewound) and not one.missed for one in records),
        refused=dict(sorted(sum((Counter(one.refused) for one in closed), Counter[str]()).items())),
        device_accuracy=share_or_none(last_evaluation(records).accuracy),
        classes=_class_names(records, opened),
        personal=is_personal(records),
        measuring=sum_known(
            sum_known(_parts(cost, "joules")) for cost in by_round(records).get(MEASURING, {}).values()
        ),
        plan=opened.plan,
        rounds=_rounds(records, closed, tasks),
        devices=_devices(records, closed, tasks),
        tasks=tasks,
    )


def _class_names(records: Iterable[AnyRecord], opened: RunOpened) -> list[str]:
    """Return what the classes are called, by the devices or by the plan."""
    told = [one.classes for one in records if isinstance(one, RoundOpened)]
    planned = opened.plan.data.classes if opened.plan.data else msgspec.UNSET
    return list(next((one for one in (*reversed(told), planned) if one is not msgspec.UNSET), ()))


def _terms(end: RoundClosed) -> dict[str, float]:
    """Return the method's own figures of a round, without those that are none."""
    told = {} if end.terms is msgspec.UNSET else end.terms
    return {name: one for name in sorted(told) if (one := known_amount(told[name]).value) is not None}


def _class_shares(end: RoundClosed) -> list[float | None]:
    return [] if end.class_accuracy is msgspec.UNSET else [share_or_none(one) for one in end.class_accuracy]


def _tasks(records: Sequence[AnyRecord], closed: Iterable[RoundClosed]) -> list[TaskDigest]:
    """Return every device's part in every round that has ended, by round and name."""
    costs, measured = by_round(records), statistics_by_round(records)
    opened = {one.round: one for one in valid(records) if isinstance(one, RoundOpened)}
    updates = {(one.round, one.device): one.update for one in valid(records) if isinstance(one, UpdateAccepted)}
    return [
        _add_statistics(
            _task(end, device, told, costs.get(end.round, {}).get(device), updates.get((end.round, device))),
            end,
            measured.get(end.round, {}).get(device),
        )
        for end in closed
        if end.round in opened
        for device, told in sorted(opened[end.round].assignments.items())
    ]


def _add_statistics(task: TaskDigest, end: RoundClosed, cost: Cost | None) -> TaskDigest:
    """Return a task with what the measurement of running statistics took its device besides, if it had a part in it."""
    if cost is None:
        return task
    seconds, joules = (_parts(cost, unit, split=True) for unit in ("s", "joules"))
    in_all = sum_known(seconds)
    own = [getattr(task.seconds, part) for part in PARTS if getattr(task.seconds, part) != NONE]
    return msgspec.structs.replace(
        task,
        seconds=msgspec.structs.replace(
            task.seconds, statistics=in_all, waiting=remaining_seconds(end.seconds, [*own, in_all])
        ),
        joules=msgspec.structs.replace(
            task.joules,
            statistics=sum_known(joules),
            above_idle=sum_known([task.joules.above_idle, _above_idle(cost, seconds, joules)]),
        ),
        statistics_bytes=sum_known(figure(cost, name) for name in ("bytes_down", "bytes_up", *CUT)),
    )


def _task(end: RoundClosed, device: str, told: Assignment, cost: Cost | None, update: Update | None) -> TaskDigest:
    arrived, split = device in end.arrived, told.steps > 0
    seconds, joules = (_parts(cost, unit, split=split) for unit in ("s", "joules"))
    return TaskDigest(
        round=end.round,
        device=device,
        arrival="arrived" if arrived else "failed" if device in end.failed else "late",
        cause=end.failed.get(device, ""),
        told=_told(told),
        examples=update.num_examples if update and arrived else None,
        loss=known_amount(update.loss).value if update and arrived else None,
        seconds=Seconds(**dict(zip(PARTS, seconds, strict=True)), waiting=remaining_seconds(end.seconds, seconds)),
        joules=Joules(**dict(zip(PARTS, joules, strict=True)), above_idle=_above_idle(cost, seconds, joules)),
        bytes_up=known_amount(end.bytes_up.get(device)),
        bytes_down=known_amount(end.bytes_down.get(device)) if device in end.bytes_down else figure(cost, "bytes_down"),
        **{name: figure(cost, name) if split else NONE for name in CUT},
    )


def _parts(cost: Cost | None, unit: str, *, split: bool = False) -> list[Amount]:
    """Return a cost's figures of one unit by `PARTS`; without a split session there is no exchange."""
    return [figure(cost, f"{part}_{unit}") if split or part != "exchange" else NONE for part in PARTS]


def _told(assignment: Assignment) -> dict[str, Told]:
    """Return what was decided for a device, as figures and words."""
    values: dict[str, Value] = {**msgspec.structs.asdict(assignment.hyper), **assignment.values}
    return {name: _one(value) for name, value in values.items()}


def _one(value: Value) -> Told:
    match value:
        case str():
            return value
        case list():
            return float(len(value))
        case _:
            return float(value)


def _above_idle(cost: Cost | None, seconds: Sequence[Amount], joules: Sequence[Amount]) -> Amount:
    """Return the joules that a task took beyond idling: J - idle_w * s, of the parts of which both are known."""
    idle = figure(cost, "idle_w")
    found = []
    for second, joule in zip(seconds, joules, strict=True):
        if second == joule == NONE:
            continue
        if idle.value is None or second.value is None or joule.value is None:
            found.append(Amount(whole=False))
        else:
            quality = largest_known([idle.quality, second.quality, joule.quality])
            found.append(Amount(value=joule.value - idle.value * second.value, quality=quality))
    return sum_known(found)


def joules(task: TaskDigest | DeviceDigest) -> Amount:
    """Return what a task, or a device, spent in all."""
    return sum_known(getattr(task.joules, part) for part in (*PARTS, "statistics"))


def _rounds(
    records: Sequence[AnyRecord], closed: Sequence[RoundClosed], tasks: Iterable[TaskDigest]
) -> list[RoundDigest]:
    online = {one.round: one.online for one in valid(records) if isinstance(one, RoundOpened)}
    accuracies_of = of_rounds(records)
    by_number: dict[int, list[TaskDigest]] = {}
    for task in tasks:
        by_number.setdefault(task.round, []).append(task)
    found: list[RoundDigest] = []
    until = SpentByRound(seconds=NONE, joules=NONE, bytes_up=NONE, bytes_down=NONE, bytes=NONE)
    for end in closed:
        own = by_number.get(end.round, [])
        spent, traffic = sum_known(joules(task) for task in own), _moved(own)
        until = SpentByRound(
            seconds=sum_known([until.seconds, known_amount(end.seconds)]),
            joules=sum_known([until.joules, spent]),
            bytes=sum_known([until.bytes, *traffic.values()]),
            **{name: sum_known([getattr(until, name), one]) for name, one in traffic.items()},
        )
        found.append(
            RoundDigest(
                round=end.round,
                outcome=end.outcome,
                online=online.get(end.round),
                selected=len(own),
                **_arrivals(own),
                **accuracies_of(end),
                class_accuracy=_class_shares(end),
                test_loss=known_amount(end.test_loss).value,
                loss=known_amount(end.loss).value,
                device_accuracy=share_or_none(end.device_accuracy),
                terms=_terms(end),
                seconds=end.seconds,
                joules=spent,
                **traffic,
                until=until,
            )
        )
    return found


def _moved(tasks: Sequence[TaskDigest]) -> dict[str, Amount]:
    """Return what tasks moved, by name in `Moved`."""
    return {name: sum_known(getattr(task, name) for task in tasks) for name in Moved.__struct_fields__}


def _arrivals(tasks: Iterable[TaskDigest]) -> _Counts:
    counts = Counter(task.arrival for task in tasks)
    return {"arrived": counts["arrived"], "late": counts["late"], "failed": counts["failed"]}


def _find_most(records: Iterable[AnyRecord]) -> dict[str, dict[str, float]]:
    """Return the highest of the readings that matter by device; of a board without a GPU there are none of one."""
    most: dict[str, dict[str, float]] = {}
    for one in records:
        if isinstance(one, Sensed):
            here = most.setdefault(one.device, {})
            for name in MOST_READINGS:
                if name in one.readings:
                    here[name] = max(one.readings[name], here.get(name, one.readings[name]))
    return most


def _devices(
    records: Sequence[AnyRecord], closed: Iterable[RoundClosed], tasks: Iterable[TaskDigest]
) -> list[DeviceDigest]:
    lengths = {end.round: end.seconds for end in closed}
    boards = {one.device: one.board for one in records if isinstance(one, Sensed) and one.board}
    versions = {one.device: one.version for one in records if isinstance(one, Joined) and one.version}
    left = Counter(one.device for one in records if isinstance(one, Left))
    most = _find_most(records)
    shares = {device: one.get("eval_accuracy") for device, one in last_evaluation(records).by_device.items()}
    by_device: dict[str, list[TaskDigest]] = {}
    for task in tasks:
        by_device.setdefault(task.device, []).append(task)
    return [
        DeviceDigest(
            device=device,
            board=boards.get(device, ""),
            version=versions.get(device, ""),
            went_away=left[device],
            most=most.get(device, {}),
            selected=len(own),
            **_arrivals(own),
            rounds_s=math.fsum(lengths[one.round] for one in own),
            seconds=Seconds(**_sums(one.seconds for one in own)),
            joules=Joules(**_sums(one.joules for one in own)),
            **_moved(own),
            accuracy=share_or_none(shares.get(device)),
        )
        for device, own in sorted(by_device.items(), key=lambda pair: natural_order(pair[0]))
    ]


def natural_order(name: str) -> list[tuple[int, str]]:
    """Return what names are ordered by: numbers in them by their size, so that `pi-2` comes before `pi-10`."""
    return [(int(part), "") if index % 2 else (0, part) for index, part in enumerate(NUMBER.split(name))]


def _sums(splits: Iterable[Seconds | Joules]) -> dict[str, Amount]:
    splits = list(splits)
    return {name: sum_known(getattr(one, name) for one in splits) for name in splits[0].__struct_fields__}
