"""Plausibility checks for reported task costs.

Joules are rejected if the device would have drawn more than 2000 W between the opening of its round and the arrival
of its update, by the server's clock. They are also rejected if they exceed `MAX_RATIO` times the median of the other
devices for the same part of a task, both in joules and in watts over that part's seconds: a large share of the data
explains many joules and a fast processor many watts, but not both at once. Parts of zero joules are not compared,
since a task without training steps has only its download. Measurements before round 1 are not part of the medians.
Seconds that the server did not see pass are rejected as well.
"""

from __future__ import annotations

import math
import statistics
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import msgspec

from edge_server.journal.records import (
    AnyRecord,
    CostSettled,
    Rewound,
    RoundClosed,
    RoundOpened,
    ServerBegan,
    UpdateAccepted,
)
from edge_server.journal.run_clock import RunClock
from shared.protocol.measurements import JOULES, Cost, Provenance, joule_parts
from shared.protocol.plausible import FIGURES, is_plausible

MAX_SOURCE = 64
MAX_RATIO = 10.0
SLACK_S = 1.0
"""Tolerance for differences between the device's and the server's clock."""
LEAST_S = 1e-3
"""Shortest part for computing watts; boards' clocks are no finer."""

PHASES: Mapping[str, str] = {
    "download": "its download",
    "compute": "computing",
    "exchange": "the exchange with its server",
    "upload": "its upload",
}
SECONDS = tuple(f"{phase}_s" for phase in PHASES)
MAX_CLOCK_RATIO, MARGIN_S = 2.0, 60.0
"""No part of a task may take more seconds than the server measured times this ratio plus this margin."""

_FIGURES = tuple(name for name in Cost.__struct_fields__ if name != "provenance")

Task: TypeAlias = tuple[int, int]
"""A device's task: rewinds of the run by then, and the round."""


def drop_implausible(cost: Cost) -> Cost:
    """Return a cost without implausible values: negative, infinite or too large."""
    figures = {name: value for name in _FIGURES if is_plausible("cost", value := getattr(cost, name))}
    provenance = {
        name: Provenance(
            source=origin.source[:MAX_SOURCE],
            quality=origin.quality,
            uncertainty=origin.uncertainty if is_plausible("cost", origin.uncertainty) else None,
        )
        for name, origin in cost.provenance.items()
        if name in figures
    }
    return Cost(**figures, provenance=provenance)


class _Figures(msgspec.Struct, frozen=True, gc=False):
    """Figures of a `Cost` that are checked; small, as a long run has one for every task."""

    download_s: float | None
    compute_s: float | None
    exchange_s: float | None
    upload_s: float | None
    download_joules: float | None
    compute_joules: float | None
    exchange_joules: float | None
    upload_joules: float | None

    @classmethod
    def of(cls, cost: Cost) -> _Figures:
        """Return those of a cost."""
        return cls(*(getattr(cost, name) for name in cls.__struct_fields__))


@dataclass(slots=True)
class Claim:
    """Cost that a device reports of one task.

    Attributes:
        split: Whether it is a split session.
        cost: Figures as reported; None before.
        wall_s: Upper bound of its duration by the server's clock; None if unknown.
        is_answered: Whether its update has arrived.
        predicted: Figures that the round's decision predicted; None without a prediction.
    """

    split: bool = False
    cost: _Figures | None = None
    wall_s: float | None = None
    is_answered: bool = False
    predicted: _Figures | None = None

    def joules(self) -> dict[str, float]:
        """Return the reported parts of its joules, unchecked."""
        if self.cost is None:
            return {}
        names = joule_parts(split=self.split)
        return {name: value for name in names if (value := getattr(self.cost, name)) is not None}

    def seconds(self, part: str) -> float | None:
        """Return the seconds over which to compute the watts of a part; None if unknown.

        These are the reported seconds of the part, capped by the server's measurement.
        """
        if self.wall_s is None:
            return None
        reported_s = getattr(self.cost, part.replace("_joules", "_s")) if self.cost else None
        most = self.wall_s + SLACK_S
        return most if reported_s is None or not math.isfinite(reported_s) else min(max(reported_s, LEAST_S), most)

    def impossible(self) -> set[str]:
        """Return the parts of its joules and seconds that no device could have spent."""
        parts = {name for name, value in self.joules().items() if not _is_possible(value, self.wall_s)}
        if self.cost is None or self.wall_s is None:
            return parts
        most = MAX_CLOCK_RATIO * self.wall_s + MARGIN_S
        return parts | {name for name in SECONDS if (value := getattr(self.cost, name)) is not None and value > most}


class RejectedFigure(NamedTuple):
    """One rejected value.

    Attributes:
        figure: Its name in `Cost`.
        wall_s: Upper bound of the task's duration; None if unknown.
    """

    device: str
    task: Task
    figure: str
    value: float
    wall_s: float | None

    def sentence(self) -> str:
        """Return the note for the journal."""
        within = "" if self.wall_s is None else f", which took {self.wall_s:.3g} s at most"
        phase, unit = self.figure.split("_")
        amount = f"{self.value:.4g} {'J' if unit == 'joules' else unit} of {PHASES[phase]}"
        return (
            f"device {self.device} reported {amount} in round {self.task[1]}{within}: "
            "implausible costs are ignored; check its meter and clock"
        )


class _Usual(NamedTuple):
    """Medians of one part of tasks: joules, and watts over its seconds."""

    joules: float
    watts: float


@dataclass
class _Ordered:
    """Joules and watts of one part of a device's tasks, both ascending, and the most joules ever reported of it."""

    joules: array[float] = field(default_factory=lambda: array("d"))
    watts: array[float] = field(default_factory=lambda: array("d"))
    most: float = 0.0


@dataclass
class PartTotal:
    """One part of the joules of all of a device's tasks.

    Attributes:
        asked: Tasks that have this part.
        told: Tasks with a plausible report of it.
        predicted: Joules predicted by the round's decision, for the other tasks that have a prediction.
    """

    asked: int = 0
    told: int = 0
    joules: float = 0.0
    most: float = 0.0
    predicted: dict[Task, float] = field(default_factory=dict)

    def expect(self, task: Task, predicted: _Figures | None, part: str) -> None:
        """Count a task without a report of this part by its prediction, if there is one."""
        joules: float | None = getattr(predicted, part) if predicted else None
        if joules is not None and is_plausible("cost_joules", joules):
            self.predicted[task] = joules


@dataclass
class DeviceClaims:
    """Tasks and reported costs of one device; sums are kept incrementally, since journals are long.

    Attributes:
        has_trained: Whether it answered a round; measurements before the first one do not count.
        impossible: Parts of tasks that no device could have spent.
    """

    tasks: dict[Task, Claim] = field(default_factory=dict)
    has_trained: bool = False
    impossible: set[tuple[Task, str]] = field(default_factory=set)
    _totals: dict[str, PartTotal] = field(default_factory=dict)
    _usual: dict[str, _Ordered] = field(default_factory=dict)

    def ask(self, task: Task, *, split: bool = False, predicted: _Figures | None = None) -> Claim:
        """Return the claim of a task, adding it if new."""
        if task not in self.tasks:
            self.tasks[task] = Claim(split=split, predicted=predicted)
            for name in joule_parts(split=split):
                total = self._totals.setdefault(name, PartTotal())
                total.asked += 1
                total.expect(task, predicted, name)
        return self.tasks[task]

    def tell(self, task: Task, cost: Cost, wall_s: float | None) -> None:
        """Set the cost of a task, replacing an earlier report.

        Args:
            task: A task added by `ask`.
            wall_s: Upper bound of its duration; None if unknown.
        """
        claim = self.tasks[task]
        before = self._possible(task)
        self._count(task, before, -1)
        claim.cost, claim.wall_s = _Figures.of(cost), wall_s
        self.has_trained |= task[1] > 0
        self.impossible -= {(task, name) for name in (*JOULES, *SECONDS)}
        self.impossible |= {(task, name) for name in claim.impossible()}
        now = self._possible(task)
        self._count(task, now, 1)
        for name, joules in before.items():
            if now.get(name, 0.0) < joules == self._totals[name].most:
                self._totals[name].most = max(
                    (self._possible(other).get(name, 0.0) for other in self.tasks), default=0.0
                )

    def totals(self, rejected: Collection[tuple[Task, str]]) -> dict[str, PartTotal]:
        """Return the totals of each part without the rejected values."""
        if not rejected:
            return self._totals
        totals = {name: PartTotal(total.asked, predicted=dict(total.predicted)) for name, total in self._totals.items()}
        for task, claim in self.tasks.items():
            for name, joules in self._possible(task).items():
                if (task, name) in rejected:
                    totals[name].expect(task, claim.predicted, name)
                else:
                    _count_joules(totals[name], joules, 1)
        return totals

    def usual(self) -> dict[str, _Usual]:
        """Return the medians of each part over its plausible reports."""
        return {
            name: _Usual(_median(ordered.joules), _median(ordered.watts))
            for name, ordered in self._usual.items()
            if ordered.joules
        }

    def beyond(self, part: str, usual: _Usual) -> set[tuple[Task, str]]:
        """Return the tasks of which a part exceeds `MAX_RATIO` times the medians."""
        if part not in self._usual or self._usual[part].most <= MAX_RATIO * usual.joules:
            return set()
        return {
            (task, part)
            for task, claim in self.tasks.items()
            if (seconds := claim.seconds(part)) is not None
            and self._possible(task).get(part, 0.0) > MAX_RATIO * max(usual.joules, usual.watts * seconds)
        }

    def _possible(self, task: Task) -> dict[str, float]:
        joules = self.tasks[task].joules()
        return {name: value for name, value in joules.items() if (task, name) not in self.impossible}

    def _count(self, task: Task, parts: Mapping[str, float], sign: int) -> None:
        """Add parts of a task to the totals and medians, or remove them (`sign` -1)."""
        claim = self.tasks[task]
        for name, joules in parts.items():
            _count_joules(self._totals[name], joules, sign)
            self._totals[name].predicted.pop(task, None)
            if sign < 0:
                self._totals[name].expect(task, claim.predicted, name)
            seconds = claim.seconds(name)
            if not joules or seconds is None:
                continue
            ordered = self._usual.setdefault(name, _Ordered())
            ordered.most = max(ordered.most, joules)
            if task[1] > 0:
                for values, figure in ((ordered.joules, joules), (ordered.watts, joules / seconds)):
                    index = bisect_left(values, figure)
                    values[index : index + (sign < 0)] = array("d", [figure] * (sign > 0))


def _count_joules(total: PartTotal, joules: float, sign: int) -> None:
    total.told += sign
    total.joules += sign * joules
    if sign > 0:
        total.most = max(total.most, joules)


def _is_possible(joules: float, wall_s: float | None) -> bool:
    """Return True if some device could spend so many joules in that time."""
    is_drawable = wall_s is None or joules <= FIGURES["cost_w"][1] * (wall_s + SLACK_S)
    return is_drawable and is_plausible("cost_joules", joules)


@dataclass
class Claims:
    """Collects the reported task costs of a run's journal, voided ones included."""

    accounts: defaultdict[str, DeviceClaims] = field(default_factory=lambda: defaultdict(DeviceClaims))
    _lives: int = 0
    _task: Task = (0, 0)
    _clock: RunClock = field(default_factory=RunClock)
    _opened: dict[Task, float | None] = field(default_factory=dict)
    _closed: float | None = None

    def take(self, records: Iterable[AnyRecord]) -> None:
        """Add the journal's next records."""
        for record in records:
            self._take_one(record, self._clock.take(record))

    def _take_one(self, record: AnyRecord, at: float | None) -> None:
        match record:
            case ServerBegan():
                self._begin(at)
            case Rewound():
                self._go_back(record)
            case RoundOpened():
                self._opened[self._lives, record.round] = at
                choices = record.decision.devices if record.decision else {}
                for device, assignment in record.assignments.items():
                    predicted = _Figures.of(choices[device].predicted) if device in choices else None
                    self.accounts[device].ask(
                        self._task_of(record.round), split=assignment.is_split, predicted=predicted
                    )
            case UpdateAccepted():
                self._accept(record, at)
            case CostSettled():
                self._settle(record)
            case RoundClosed():
                self._closed = at
            case _:
                pass

    def _task_of(self, number: int) -> Task:
        """Return the task of a round, one object for all devices: a long run has many."""
        if self._task != (self._lives, number):
            self._task = (self._lives, number)
        return self._task

    def _begin(self, at: float | None) -> None:
        """Start a new server process; if the downtime is unknown, so are durations that span it."""
        if not self._clock.is_known:
            self._opened, self._closed = dict.fromkeys(self._opened), None
        elif self._closed is None:
            self._closed = at

    def _go_back(self, record: Rewound) -> None:
        """Repeat rounds without forgetting what was spent; if an opening stays valid, its devices are asked again."""
        before, self._lives = (self._lives, record.round), self._lives + 1
        repeated = self._lives, record.round
        for account in self.accounts.values():
            if record.reopened and before in account.tasks:
                account.ask(repeated, split=account.tasks[before].split, predicted=account.tasks[before].predicted)
                self._opened[repeated] = self._opened.get(before)

    def _accept(self, record: UpdateAccepted, at: float | None) -> None:
        task, account = self._task_of(record.round), self.accounts[record.device]
        measured = record.update.cost.exchange_s is not None  # running statistics, in a session that opened no round
        account.ask(task, split=measured).is_answered = True
        start = self._opened.get(task, self._closed)
        account.tell(task, record.update.cost, _seconds_between(start, at))

    def _settle(self, record: CostSettled) -> None:
        """Set the final cost of a task that the device was assigned; costs of other tasks are ignored."""
        task = self._lives, record.round
        account = self.accounts[record.device] if record.device in self.accounts else DeviceClaims()
        if claim := account.tasks.get(task):
            late_s = _seconds_between(self._opened.get(task), self._clock.last_s)
            account.tell(task, record.cost, claim.wall_s if claim.is_answered else late_s)

    def beyond(self) -> dict[str, set[tuple[Task, str]]]:
        """Return the parts of tasks that exceed `MAX_RATIO` times the other devices' medians, by device."""
        usual = {device: account.usual() for device, account in self.accounts.items()}
        tasks = dict[str, set[tuple[Task, str]]]()
        for part in JOULES:
            medians_by_device = {device: medians[part] for device, medians in usual.items() if part in medians}
            joules, watts = (
                _medians_of_others(
                    {device: getattr(device_medians, figure) for device, device_medians in medians_by_device.items()}
                )
                for figure in _Usual._fields
            )
            for device, account in self.accounts.items() if medians_by_device else ():
                if device not in medians_by_device:
                    medians = _Usual(
                        *(statistics.median(values) for values in zip(*medians_by_device.values(), strict=True))
                    )
                elif device in joules:
                    medians = _Usual(joules[device], watts[device])
                else:
                    continue  # no other device has told this part
                if beyond := account.beyond(part, medians):
                    tasks.setdefault(device, set()).update(beyond)
        return tasks

    def rejected_figures(self) -> list[RejectedFigure]:
        """Return the rejected values in order of device and task."""
        beyond, rejected = self.beyond(), list[RejectedFigure]()
        for device, account in sorted(self.accounts.items()):
            for task, name in sorted(account.impossible | beyond.get(device, set())):
                claim = account.tasks[task]
                rejected.append(RejectedFigure(device, task, name, getattr(claim.cost, name), claim.wall_s))
        return rejected


def _seconds_between(start: float | None, stop: float | None) -> float | None:
    return None if start is None or stop is None else max(0.0, stop - start)


def _median(ordered: Sequence[float]) -> float:
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _medians_of_others(values: Mapping[str, float]) -> dict[str, float]:
    """Return for each name the median of the others' values; nothing for a single name."""
    ordered = sorted(values.items(), key=lambda pair: pair[1])
    others, medians = len(ordered) - 1, dict[str, float]()
    for index, (name, _) in enumerate(ordered) if others else ():
        middle = [ordered[k + (k >= index)][1] for k in ((others - 1) // 2, others // 2)]
        medians[name] = sum(middle) / len(middle)
    return medians


def drop_figures(cost: Cost, figures: Iterable[str]) -> Cost:
    """Return a cost without some of its values."""
    omitted = frozenset(figures)
    remaining = {name: value for name in _FIGURES if name not in omitted and (value := getattr(cost, name)) is not None}
    return Cost(
        **remaining, provenance={name: origin for name, origin in cost.provenance.items() if name not in omitted}
    )


def find_rejected_figures(records: Iterable[AnyRecord]) -> dict[tuple[int, str], dict[str, float]]:
    """Return the rejected values of a run by round and device."""
    claims, rejected = Claims(), dict[tuple[int, str], dict[str, float]]()
    claims.take(records)
    for figure in claims.rejected_figures():
        rejected.setdefault((figure.task[1], figure.device), {})[figure.figure] = figure.value
    return rejected
