"""Budgets of a run: seconds and joules spent, by its journal alone, so that a restarted server finds the same figures.

Spent is spent: also the seconds and joules of rounds that were made void later. Joules that nobody told are charged as
the round's decision predicted them for that task: those of an upload become known with the device's next message. What
no decision predicted is charged as the dearest that the same device has told of that part of a task in this run. Of a
device that has told none of its computations no more can be charged; under a budget of joules it takes no further part.
What is not believed counts as not told; see `edge_server.journal.claims`. What a task's joules are says
`shared.protocol.measurements`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from edge_server.journal.claims import Claims, PartTotal
from edge_server.journal.decision import Granted, Pledged
from edge_server.journal.records import AnyRecord, Gossiped, Noted, RoundClosed
from edge_server.plan.sections import BudgetPlan

COMPUTE = "compute_joules"
TOLERANCE = 1e-9
"""Share of what is left by which a sum may exceed it: an optimizer that spends all leaves rounding errors."""
SHORTFALL = 0.02
"""Share by which a predicted part is charged too high: predictions leave out acknowledgements and headers of messages,
and a budget must not be overspent for these."""


@dataclass(frozen=True)
class RunSpending:
    """What a run has spent so far.

    Attributes:
        seconds: Of the rounds that have ended, together.
        joules: Of all tasks of all devices, those charged included; None where no device has told any.
        charged: The joules of these that were charged, since nobody told them.
        is_whole: Whether something stands for every part of every task; if not, `joules` is a lower bound.
        unmetered: Devices that answered a task and told no joules of any computation, in order of name.
        moved: Joules that came to this site of others' shares of the plan's, by the coordinator's grants; below zero
            where it gave more than it got, or was not told yet what became of what it gave.
        backhaul_s: Seconds that the slowest neighbour's model took to come in the last gossip in which one came; None
            before. The seconds of gossips are part of the rounds'.
    """

    seconds: float
    joules: float | None
    charged: float
    is_whole: bool
    unmetered: tuple[str, ...]
    moved: float = 0.0
    backhaul_s: float | None = None


@dataclass
class Ledger:
    """Adds a journal up.

    Attributes:
        seen: Records taken so far.
    """

    seen: int = 0
    _noted: set[str] = field(default_factory=set)
    _seconds: list[float] = field(default_factory=list)
    _moved: list[float] = field(default_factory=list)
    _claims: Claims = field(default_factory=Claims)
    _backhaul_s: float | None = None

    def take(self, records: Iterable[AnyRecord]) -> None:
        """Take the journal's next records."""
        for record in records:
            self.seen += 1
            self._claims.take([record])
            match record:
                case RoundClosed():
                    self._seconds.append(record.seconds)
                case Gossiped():
                    self._backhaul_s = max(record.transfer_s.values(), default=self._backhaul_s)
                case Noted():
                    self._noted.add(record.what)
                case Pledged() | Granted():
                    self._moved.append(record.joules if isinstance(record, Granted) else -record.joules)
                case _:
                    pass

    def spending(self) -> RunSpending:
        """Return what is spent."""
        parts = list(self._parts())
        dearest = _dearest(parts)
        charged = math.fsum(_charged(total, dearest[device, name]) for device, name, total in parts)
        dark = {device for device, name, total in parts if name == COMPUTE and not total.told}
        told = math.fsum(total.joules for _, _, total in parts)
        return RunSpending(
            seconds=math.fsum(self._seconds),
            joules=told + charged if any(total.told for _, _, total in parts) else None,
            charged=charged,
            is_whole=all(_is_covered(name, total, dearest[device, name]) for device, name, total in parts),
            unmetered=tuple(device for device in sorted(dark) if self._claims.accounts[device].has_trained),
            moved=math.fsum(self._moved),
            backhaul_s=self._backhaul_s,
        )

    def dearest(self) -> dict[str, float]:
        """Return the joules charged for a task of which nothing is told, by device that has told any."""
        found, parts = dict[str, float](), list(self._parts())
        dearest = _dearest(parts)
        for device, name, total in parts:
            if total.told:
                found[device] = found.get(device, 0.0) + dearest[device, name]
        return found

    def doubts(self) -> list[str]:
        """Return what the record does not say yet of claims that are not believed, one sentence a device."""
        first = {one.device: one for one in reversed(self._claims.doubts())}
        named = {what.partition(" told ")[0] for what in self._noted}
        return [one.sentence() for device, one in sorted(first.items()) if f"device {device}" not in named]

    def _parts(self) -> Iterator[tuple[str, str, PartTotal]]:
        """Yield every part of the joules of all tasks of every device, without what is not believed."""
        beyond = self._claims.beyond()
        for device, account in sorted(self._claims.accounts.items()):
            yield from ((device, name, total) for name, total in account.totals(beyond.get(device, ())).items())


def _dearest(parts: Iterable[tuple[str, str, PartTotal]]) -> dict[tuple[str, str], float]:
    """Return the joules charged for a part of a task that is not told, by device and part.

    They are the most that the device has told of that part; where all of it was zero, as of tasks without any training
    step, the median of what other devices have told at most.
    """
    most = {(device, name): total.most for device, name, total in parts}
    above = {key: joules for key, joules in most.items() if joules > 0}
    usual = {
        part: statistics.median(joules for (_, name), joules in above.items() if name == part)
        for part in {name for _, name in above}
    }
    return {(device, name): joules or usual.get(name, 0.0) for (device, name), joules in most.items()}


def _charged(total: PartTotal, dearest: float) -> float:
    """Return the joules of a part that are charged for the tasks that told none of it."""
    others = total.asked - total.told - len(total.predicted) if total.told else 0
    return math.fsum([*((1 + SHORTFALL) * one for one in total.predicted.values()), dearest * others])


def _is_covered(part: str, total: PartTotal, dearest: float) -> bool:
    """Return whether something stands for every task's joules of a part; computing is never free."""
    if total.told + len(total.predicted) == total.asked:
        return True
    return bool(total.told) and (dearest > 0 or part != COMPUTE)


def foreseen_joules(
    devices: Sequence[str], predicted: Mapping[str, float], dearest: Mapping[str, float]
) -> dict[str, float]:
    """Return what the next task of each device will take.

    Args:
        predicted: What was predicted of it, by device; else it is taken for the dearest.
        dearest: Of those that have told any; others are taken for what is usual, for nothing where nobody has.
    """
    usual = statistics.median(dearest.values()) if dearest else 0.0
    return {device: predicted.get(device, dearest.get(device, usual)) for device in devices}


def affordable(foreseen: Mapping[str, float], left: float) -> tuple[str, ...]:
    """Return as many devices as can be paid for, the cheapest first, in order of name.

    Args:
        foreseen: Joules of each.
        left: Joules that may be spent.
    """
    left += TOLERANCE * max(left, 0.0)
    if math.fsum(foreseen.values()) <= left:
        return tuple(sorted(foreseen))
    chosen, spent = list[str](), 0.0
    for device in sorted(foreseen, key=lambda one: (foreseen[one], one)):
        spent += foreseen[device]
        if spent > left:
            break
        chosen.append(device)
    return tuple(sorted(chosen))


def spent_budget(budget: BudgetPlan, spent: RunSpending) -> str:
    """Return which budget is spent, as a sentence for the record; empty where none is."""
    if budget.time_s is not None and spent.seconds >= budget.time_s:
        return f"budget.time_s: {spent.seconds:.6g} s of {budget.time_s:g} s are spent"
    if budget.joules is None or spent.joules is None or spent.joules < (own := budget.joules + spent.moved):
        return ""
    least, parts = "" if spent.is_whole else "at least ", ""
    if spent.charged:
        parts = f", {spent.charged:.6g} J of them charged for what devices did not tell"
    return f"budget.joules: {least}{spent.joules:.6g} J of {own:g} J are spent{parts}"
