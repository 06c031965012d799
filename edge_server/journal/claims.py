"""Plausibility of what devices claim that tasks cost: by figure, by the server's own clock, by other devices' claims.

Joules are not believed where the device would have drawn more than `MOST_W` from the moment at which its round was
opened to that at which its update had come, by the server's clock; nor where they are more than `TIMES` what the same
part of tasks of the other devices takes (their median), in joules and in watts over that part's seconds as well. A
large share of the data makes the joules of an honest device many, a fast processor its watts; both at once would be a
claim. Parts are compared with the same part alone, and a part that took nothing is not compared: a task without any
training step takes its download only, which says nothing of what a step takes. What was measured before round 1 is no
task and is not usual. Nor are seconds believed that the server did not see pass.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

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

MAX_SOURCE = 64
MOST, MOST_JOULES = 1e18, 1e9
"""No task takes so many seconds, cycles or bytes; nor so many joules. So sums cannot overflow."""
MOST_W, TIMES = 2000.0, 10.0
SLACK_S = 1.0
"""Is added to what the server's clock says of a task: between two clocks some of it may be lost."""
LEAST_S = 1e-3
"""Of a part for its watts: clocks of boards tell no less."""

PHASES: Mapping[str, str] = {
    "download": "its download",
    "compute": "computing",
    "exchange": "the exchange with its server",
    "upload": "its upload",
}
SECONDS = tuple(f"{phase}_s" for phase in PHASES)
MOST_TIMES, ROOM_S = 2.0, 60.0
"""No part of a task takes twice as many seconds as the server saw pass, and a minute."""

_FIGURES = tuple(name for name in Cost.__struct_fields__ if name != "provenance")

Task: TypeAlias = tuple[int, int]
"""Of one device: how often the run had gone back by then, and the round."""


def plausible(cost: Cost) -> Cost:
    """Return a cost without what cannot be true: figures below zero or too large, sources of figures it has not."""
    figures = {name: value for name in _FIGURES if _is_figure(value := getattr(cost, name))}
    provenance = {
        name: Provenance(source=one.source[:MAX_SOURCE], quality=one.quality, uncertainty=_share(one.uncertainty))
        for name, one in cost.provenance.items()
        if name in figures
    }
    return Cost(**figures, provenance=provenance)


def _is_figure(value: float | None, most: float = MOST) -> bool:
    return value is not None and math.isfinite(value) and 0 <= value <= most


def _share(value: float | None) -> float | None:
    return value if value is not None and _is_figure(value) else None


@dataclass
class Claim:
    """What a device says that one task cost it.

    Attributes:
        split: Whether it is a split session.
        cost: As told; None while nothing is.
        wall_s: Seconds that it can have taken, by the server's clock; None where nobody knows.
        is_answered: Whether its update has come.
        predicted: What the round's decision predicted that it costs; None where nothing was.
    """

    split: bool = False
    cost: Cost | None = None
    wall_s: float | None = None
    is_answered: bool = False
    predicted: Cost | None = None

    def joules(self) -> dict[str, float]:
        """Return the parts of its joules that were told, as told."""
        if self.cost is None:
            return {}
        names = joule_parts(split=self.split)
        return {name: told for name in names if (told := getattr(self.cost, name)) is not None}

    def seconds(self, part: str) -> float | None:
        """Return the seconds over which the watts of a part of its joules are taken; None where nobody knows them.

        Those that were told of the part, and no more than the server saw pass.
        """
        if self.wall_s is None:
            return None
        told = getattr(self.cost, part.replace("_joules", "_s")) if self.cost else None
        most = self.wall_s + SLACK_S
        return most if told is None or not math.isfinite(told) else min(max(told, LEAST_S), most)

    def impossible(self) -> set[str]:
        """Return the parts, of its joules and of its seconds, that no device could have spent."""
        found = {name for name, told in self.joules().items() if not _is_possible(told, self.wall_s)}
        if self.cost is None or self.wall_s is None:
            return found
        most = MOST_TIMES * self.wall_s + ROOM_S
        return found | {name for name in SECONDS if (told := getattr(self.cost, name)) is not None and told > most}


class Disbelief(NamedTuple):
    """One figure that is not believed.

    Attributes:
        figure: Its name in `Cost`.
        wall_s: Seconds that the task can have taken; None where nobody knows.
    """

    device: str
    task: Task
    figure: str
    value: float
    wall_s: float | None

    def sentence(self) -> str:
        """Return what the record says of it."""
        within = "" if self.wall_s is None else f", which took {self.wall_s:.3g} s at most"
        phase, unit = self.figure.split("_")
        told = f"{self.value:.4g} {'J' if unit == 'joules' else unit} of {PHASES[phase]}"
        return (
            f"device {self.device} told {told} in round {self.task[1]}{within}: "
            "such claims are not believed, and count as if they had not been told; look at its meter and clock"
        )


class _Usual(NamedTuple):
    """Medians of one part of tasks: its joules, and its watts over its seconds."""

    joules: float
    watts: float


@dataclass
class _Ordered:
    """Joules and watts of one part of a device's tasks, each ascending, and the most joules ever told of it."""

    joules: list[float] = field(default_factory=list)
    watts: list[float] = field(default_factory=list)
    most: float = 0.0


@dataclass
class PartTotal:
    """One part of the joules of all of a device's tasks.

    Attributes:
        asked: Tasks that have this part.
        told: Those whose part was told, and can be true.
        joules: The sum of these.
        most: The largest of these.
        predicted: Of the others, those for which the round's decision predicted this part, with the joules.
    """

    asked: int = 0
    told: int = 0
    joules: float = 0.0
    most: float = 0.0
    predicted: dict[Task, float] = field(default_factory=dict)

    def expect(self, task: Task, predicted: Cost | None, part: str) -> None:
        """Count a task that has told nothing of this part by what was predicted, if anything was."""
        joules: float | None = getattr(predicted, part) if predicted else None
        if joules is not None and _is_figure(joules, MOST_JOULES):
            self.predicted[task] = joules


@dataclass
class DeviceClaims:
    """What one device was given and what it told of it, added up as it comes: journals are long.

    Attributes:
        has_trained: Whether it answered a round; what was measured before the first one is another matter.
        impossible: Parts of tasks that no device could have spent.
    """

    tasks: dict[Task, Claim] = field(default_factory=dict)
    has_trained: bool = False
    impossible: set[tuple[Task, str]] = field(default_factory=set)
    _totals: dict[str, PartTotal] = field(default_factory=dict)
    _usual: dict[str, _Ordered] = field(default_factory=dict)

    def ask(self, task: Task, *, split: bool = False, predicted: Cost | None = None) -> Claim:
        """Return the claim of a task, which is new or was asked for before."""
        if task not in self.tasks:
            self.tasks[task] = Claim(split=split, predicted=predicted)
            for name in joule_parts(split=split):
                total = self._totals.setdefault(name, PartTotal())
                total.asked += 1
                total.expect(task, predicted, name)
        return self.tasks[task]

    def tell(self, task: Task, cost: Cost, wall_s: float | None) -> None:
        """Take what a task cost, in place of what was told of it before.

        Args:
            task: One that was asked for.
            wall_s: Seconds that it can have taken; None where nobody knows.
        """
        claim = self.tasks[task]
        before = self._possible(task)
        self._count(task, before, -1)
        claim.cost, claim.wall_s = cost, wall_s
        self.has_trained |= task[1] > 0
        self.impossible -= {(task, name) for name in (*JOULES, *SECONDS)}
        self.impossible |= {(task, name) for name in claim.impossible()}
        now = self._possible(task)
        self._count(task, now, 1)
        for name, joules in before.items():
            if now.get(name, 0.0) < joules == self._totals[name].most:
                self._totals[name].most = max((self._possible(one).get(name, 0.0) for one in self.tasks), default=0.0)

    def totals(self, doubted: Collection[tuple[Task, str]]) -> dict[str, PartTotal]:
        """Return the sums of each part, without those figures that other devices' make doubtful."""
        if not doubted:
            return self._totals
        found = {name: PartTotal(total.asked, predicted=dict(total.predicted)) for name, total in self._totals.items()}
        for task, claim in self.tasks.items():
            for name, joules in self._possible(task).items():
                if (task, name) in doubted:
                    found[name].expect(task, claim.predicted, name)
                else:
                    _add(found[name], joules, 1)
        return found

    def usual(self) -> dict[str, _Usual]:
        """Return the medians of each part of its tasks, of those that it has told and that can be true."""
        return {
            name: _Usual(_median(ordered.joules), _median(ordered.watts))
            for name, ordered in self._usual.items()
            if ordered.joules
        }

    def beyond(self, part: str, usual: _Usual) -> set[tuple[Task, str]]:
        """Return the tasks of which a part is too many times what is usual."""
        if part not in self._usual or self._usual[part].most <= TIMES * usual.joules:
            return set()
        return {
            (task, part)
            for task, claim in self.tasks.items()
            if (seconds := claim.seconds(part)) is not None
            and self._possible(task).get(part, 0.0) > TIMES * max(usual.joules, usual.watts * seconds)
        }

    def _possible(self, task: Task) -> dict[str, float]:
        told = self.tasks[task].joules()
        return {name: one for name, one in told.items() if (task, name) not in self.impossible}

    def _count(self, task: Task, parts: Mapping[str, float], sign: int) -> None:
        """Add parts of a task to the sums and to what is usual, or take them out again."""
        claim = self.tasks[task]
        for name, joules in parts.items():
            _add(self._totals[name], joules, sign)
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
                    place = bisect_left(values, figure)
                    values[place : place + (sign < 0)] = [figure] * (sign > 0)


def _add(total: PartTotal, joules: float, sign: int) -> None:
    total.told += sign
    total.joules += sign * joules
    if sign > 0:
        total.most = max(total.most, joules)


def _is_possible(joules: float, wall_s: float | None) -> bool:
    """Tell whether any device could have spent so much in so long."""
    most = MOST_JOULES if wall_s is None else min(MOST_JOULES, MOST_W * (wall_s + SLACK_S))
    return _is_figure(joules, most)


@dataclass
class Claims:
    """Collects what a run's journal says of the costs of its tasks, those that were made void later included."""

    accounts: defaultdict[str, DeviceClaims] = field(default_factory=lambda: defaultdict(DeviceClaims))
    _lives: int = 0
    _clock: RunClock = field(default_factory=RunClock)
    _opened: dict[Task, float | None] = field(default_factory=dict)
    _closed: float | None = None

    def take(self, records: Iterable[AnyRecord]) -> None:
        """Take the journal's next records."""
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
                decided = record.decision.devices if record.decision else {}
                for device, told in record.assignments.items():
                    predicted = decided[device].predicted if device in decided else None
                    self.accounts[device].ask((self._lives, record.round), split=told.is_split, predicted=predicted)
            case UpdateAccepted():
                self._accept(record, at)
            case CostSettled():
                self._settle(record)
            case RoundClosed():
                self._closed = at
            case _:
                pass

    def _begin(self, at: float | None) -> None:
        """Begin with another process of the server; where it does not know for how long there was none, nobody does."""
        if not self._clock.is_known:
            self._opened, self._closed = dict.fromkeys(self._opened), None
        elif self._closed is None:
            self._closed = at

    def _go_back(self, record: Rewound) -> None:
        """Begin rounds anew, beside what is spent on them; where an opening stays, who was asked is asked again."""
        before, self._lives = (self._lives, record.round), self._lives + 1
        again = self._lives, record.round
        for account in self.accounts.values():
            if record.reopened and before in account.tasks:
                account.ask(again, split=account.tasks[before].split, predicted=account.tasks[before].predicted)
                self._opened[again] = self._opened.get(before)

    def _accept(self, record: UpdateAccepted, at: float | None) -> None:
        task, account = (self._lives, record.round), self.accounts[record.device]
        measured = record.update.cost.exchange_s is not None  # running statistics, in a session that opened no round
        account.ask(task, split=measured).is_answered = True
        start = self._opened.get(task, self._closed)
        account.tell(task, record.update.cost, _between(start, at))

    def _settle(self, record: CostSettled) -> None:
        """Take the whole cost of a task that the device was given; nobody else spends on the run's account."""
        task = self._lives, record.round
        account = self.accounts[record.device] if record.device in self.accounts else DeviceClaims()
        if claim := account.tasks.get(task):
            late_s = _between(self._opened.get(task), self._clock.last_s)
            account.tell(task, record.cost, claim.wall_s if claim.is_answered else late_s)

    def beyond(self) -> dict[str, set[tuple[Task, str]]]:
        """Return the parts of tasks that are too many times what others take, by device."""
        usual = {device: account.usual() for device, account in self.accounts.items()}
        found = dict[str, set[tuple[Task, str]]]()
        for part in JOULES:
            known = {device: medians[part] for device, medians in usual.items() if part in medians}
            joules, watts = (
                _medians_of_others({device: getattr(one, figure) for device, one in known.items()})
                for figure in _Usual._fields
            )
            for device, account in self.accounts.items() if known else ():
                if device not in known:
                    medians = _Usual(*(statistics.median(values) for values in zip(*known.values(), strict=True)))
                elif device in joules:
                    medians = _Usual(joules[device], watts[device])
                else:
                    continue  # no other device has told this part
                if beyond := account.beyond(part, medians):
                    found.setdefault(device, set()).update(beyond)
        return found

    def doubts(self) -> list[Disbelief]:
        """Return the figures that are not believed, in order of device and task."""
        beyond, found = self.beyond(), list[Disbelief]()
        for device, account in sorted(self.accounts.items()):
            for task, name in sorted(account.impossible | beyond.get(device, set())):
                claim = account.tasks[task]
                found.append(Disbelief(device, task, name, getattr(claim.cost, name), claim.wall_s))
        return found


def _between(start: float | None, stop: float | None) -> float | None:
    return None if start is None or stop is None else max(0.0, stop - start)


def _median(ordered: Sequence[float]) -> float:
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _medians_of_others(values: Mapping[str, float]) -> dict[str, float]:
    """Return the median of all values but its own, by name; nothing where there are no others."""
    ordered = sorted(values.items(), key=lambda pair: pair[1])
    rest, found = len(ordered) - 1, dict[str, float]()
    for place, (name, _) in enumerate(ordered) if rest else ():
        middle = [ordered[k + (k >= place)][1] for k in ((rest - 1) // 2, rest // 2)]
        found[name] = sum(middle) / len(middle)
    return found


def without(cost: Cost, figures: Iterable[str]) -> Cost:
    """Return a cost without some of its figures."""
    gone = frozenset(figures)
    kept = {name: value for name in _FIGURES if name not in gone and (value := getattr(cost, name)) is not None}
    return Cost(**kept, provenance={name: one for name, one in cost.provenance.items() if name not in gone})


def doubted_figures(records: Iterable[AnyRecord]) -> dict[tuple[int, str], dict[str, float]]:
    """Return the figures of a run that are not believed, with what was told, by round and device."""
    claims, found = Claims(), dict[tuple[int, str], dict[str, float]]()
    claims.take(records)
    for one in claims.doubts():
        found.setdefault((one.task[1], one.device), {})[one.figure] = one.value
    return found
