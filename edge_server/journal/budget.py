"""Budgets of a run: seconds and joules spent, by its journal alone, so that a restarted server finds the same figures.

Spent is spent: also the seconds and joules of rounds that were made void later. Joules that nobody told are never
zero: they are charged as the dearest that the same device has told of that part of a task in this run. Of a device that
has told none of its computations nothing can be charged; under a budget of joules it takes no further part.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from edge_server.journal.costs import plausible
from edge_server.journal.records import AnyRecord, CostSettled, Rewound, RoundClosed, RoundOpened, UpdateAccepted
from edge_server.plan.sections import BudgetPlan
from shared.protocol.measurements import Cost

PARTS = ("download_joules", "compute_joules", "upload_joules")


@dataclass(frozen=True)
class RunSpending:
    """What a run has spent so far.

    Attributes:
        seconds: Of the rounds that have ended, together.
        joules: Of all tasks of all devices, those charged included; None where no device has told any.
        charged: The joules of these that were charged, since nobody told them.
        is_whole: Whether something stands for every part of every task; if not, `joules` is a lower bound.
        unmetered: Devices that answered a task and told no joules of any computation, in order of name.
    """

    seconds: float
    joules: float | None
    charged: float
    is_whole: bool
    unmetered: tuple[str, ...]


@dataclass
class Ledger:
    """Adds a journal up.

    Attributes:
        seen: Records taken so far.
    """

    seen: int = 0
    _seconds: list[float] = field(default_factory=list)
    _lives: int = 0
    _tasks: defaultdict[str, dict[tuple[int, int], Cost | None]] = field(default_factory=lambda: defaultdict(dict))

    def take(self, records: Iterable[AnyRecord]) -> None:
        """Take the journal's next records."""
        for record in records:
            self.seen += 1
            match record:
                case Rewound():
                    self._go_back(record)
                case RoundOpened():
                    for device in record.assignments:
                        self._tasks[device].setdefault((self._lives, record.round), None)
                case UpdateAccepted():
                    self._tasks[record.device][self._lives, record.round] = plausible(record.update.cost)
                case CostSettled():
                    self._tasks[record.device][self._lives, record.round] = plausible(record.cost)
                case RoundClosed():
                    self._seconds.append(record.seconds)
                case _:
                    pass

    def _go_back(self, record: Rewound) -> None:
        """Begin rounds anew, beside what is spent on them; where an opening stays, who was asked is asked again."""
        self._lives += 1
        for tasks in self._tasks.values():
            if record.reopened and (self._lives - 1, record.round) in tasks:
                tasks[self._lives, record.round] = None

    def spending(self) -> RunSpending:
        """Return what is spent."""
        told, charged, gaps, unmetered = list[float](), list[float](), 0, list[str]()
        for device, tasks in sorted(self._tasks.items()):
            for part in PARTS:
                figures = [getattr(cost, part, None) for cost in tasks.values()]
                known = [one for one in figures if one is not None]
                told += known
                charged += [max(known)] * (len(figures) - len(known)) if known else []
                gaps += 0 if known else len(figures)
                if part == "compute_joules" and not known and _has_trained(tasks):
                    unmetered.append(device)
        return RunSpending(
            seconds=math.fsum(self._seconds),
            joules=math.fsum([*told, *charged]) if told else None,
            charged=math.fsum(charged),
            is_whole=not gaps,
            unmetered=tuple(unmetered),
        )


def _has_trained(tasks: dict[tuple[int, int], Cost | None]) -> bool:
    """Tell whether a device answered a round; what was measured before the first one is another matter."""
    return any(cost is not None and number > 0 for (_, number), cost in tasks.items())


def spent_budget(budget: BudgetPlan, spent: RunSpending) -> str:
    """Return which budget is spent, as a sentence for the record; empty where none is."""
    if budget.time_s is not None and spent.seconds >= budget.time_s:
        return f"budget.time_s: {spent.seconds:.6g} s of {budget.time_s:g} s are spent"
    if budget.joules is None or spent.joules is None or spent.joules < budget.joules:
        return ""
    least, parts = "" if spent.is_whole else "at least ", ""
    if spent.charged:
        parts = f", {spent.charged:.6g} J of them charged for what devices did not tell"
    return f"budget.joules: {least}{spent.joules:.6g} J of {budget.joules:g} J are spent{parts}"
