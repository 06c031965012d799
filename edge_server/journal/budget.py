"""Budget accounting of a run: seconds and joules spent, from its journal alone.

A restarted server therefore computes the same values. Voided rounds still count as spent. Joules that a device did not
report are charged as the round's decision predicted them; without a prediction, as the most that the device reported of
that part of a task in this run. A device that never reported its computations cannot be charged any further; under a
joule budget it no longer takes part. Implausible reports count as missing, see `edge_server.journal.claims`; the parts
of a task's joules are defined in `shared.protocol.measurements`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from edge_server.journal.claims import Claims, PartTotal
from edge_server.journal.decision import Granted, Pledged
from edge_server.journal.records import IMPLAUSIBLE_COST, AnyRecord, Gossiped, Noted, RoundClosed
from edge_server.plan.budget import BudgetPlan

COMPUTE = "compute_joules"
TOLERANCE = 1e-9
"""Relative rounding error by which a sum may exceed the rest of a budget: an optimizer may spend all of it."""
SHORTFALL = 0.02
"""Relative surcharge on predicted parts, since predictions omit acknowledgements and message headers."""


@dataclass(frozen=True)
class RunSpending:
    """Spending of a run so far.

    Attributes:
        seconds: Sum over ended rounds.
        joules: Of all tasks, estimates included; None if no device has reported any.
        charged: Part of these that was estimated for lack of reports.
        is_whole: Whether every part of every task is reported or estimated; if not, `joules` is a lower bound.
        unmetered: Devices, sorted, that answered a task but reported no joules of computation.
        moved: Joules that this site received from other sites' shares by the coordinator's grants; negative if it gave
            more, or does not know yet what became of its pledge.
        backhaul_s: Transfer time of the slowest neighbour's model in the last gossip that delivered one; None before.
            Seconds of gossip are part of the rounds'.
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
    """Accumulates the spending of a journal.

    Attributes:
        seen: Records taken so far.
    """

    seen: int = 0
    _doubted: set[str] = field(default_factory=set)
    _seconds: list[float] = field(default_factory=list)
    _moved: list[float] = field(default_factory=list)
    _claims: Claims = field(default_factory=Claims)
    _backhaul_s: float | None = None

    def take(self, records: Iterable[AnyRecord]) -> None:
        """Add the journal's next records."""
        for record in records:
            self.seen += 1
            self._claims.take([record])
            match record:
                case RoundClosed():
                    self._seconds.append(record.seconds)
                case Gossiped():
                    self._backhaul_s = max(record.transfer_s.values(), default=self._backhaul_s)
                case Noted() if record.reason == IMPLAUSIBLE_COST:
                    self._doubted.add(record.device)
                case Pledged() | Granted():
                    self._moved.append(record.joules if isinstance(record, Granted) else -record.joules)
                case _:
                    pass

    def spending(self) -> RunSpending:
        """Return the spending so far."""
        parts = list(self._parts())
        dearest = _dearest(parts)
        charged = math.fsum(_charge(total, dearest[device, name]) for device, name, total in parts)
        unmetered = {device for device, name, total in parts if name == COMPUTE and not total.told}
        reported = math.fsum(total.joules for _, _, total in parts)
        return RunSpending(
            seconds=math.fsum(self._seconds),
            joules=reported + charged if any(total.told for _, _, total in parts) else None,
            charged=charged,
            is_whole=all(_is_covered(name, total, dearest[device, name]) for device, name, total in parts),
            unmetered=tuple(device for device in sorted(unmetered) if self._claims.accounts[device].has_trained),
            moved=math.fsum(self._moved),
            backhaul_s=self._backhaul_s,
        )

    def dearest(self) -> dict[str, float]:
        """Return the joules charged for a task without any report, by device that has reported some."""
        charges, parts = dict[str, float](), list(self._parts())
        dearest = _dearest(parts)
        for device, name, total in parts:
            if total.told:
                charges[device] = charges.get(device, 0.0) + dearest[device, name]
        return charges

    def doubts(self) -> list[Noted]:
        """Return a note about the first rejected value of each device that the journal does not mention yet."""
        first = {doubt.device: doubt for doubt in reversed(self._claims.rejected_figures())}
        return [
            Noted(what=doubt.sentence(), reason=IMPLAUSIBLE_COST, device=device)
            for device, doubt in sorted(first.items())
            if device not in self._doubted
        ]

    def _parts(self) -> Iterator[tuple[str, str, PartTotal]]:
        """Yield (device, part, total) of the joules of all tasks, without rejected values."""
        beyond = self._claims.beyond()
        for device, account in sorted(self._claims.accounts.items()):
            yield from ((device, name, total) for name, total in account.totals(beyond.get(device, ())).items())


def _dearest(parts: Iterable[tuple[str, str, PartTotal]]) -> dict[tuple[str, str], float]:
    """Return the joules charged for an unreported part of a task, by device and part.

    This is the most that the device reported of the part; if that is zero, as for tasks without training steps, the
    median of the other devices' maxima.
    """
    most = {(device, name): total.most for device, name, total in parts}
    above = {key: joules for key, joules in most.items() if joules > 0}
    usual = {
        part: statistics.median(joules for (_, name), joules in above.items() if name == part)
        for part in {name for _, name in above}
    }
    return {(device, name): joules or usual.get(name, 0.0) for (device, name), joules in most.items()}


def _charge(total: PartTotal, dearest: float) -> float:
    others = total.asked - total.told - len(total.predicted) if total.told else 0
    return math.fsum([*((1 + SHORTFALL) * joules for joules in total.predicted.values()), dearest * others])


def _is_covered(part: str, total: PartTotal, dearest: float) -> bool:
    """Return True if every task's joules of a part are reported or estimated; computation is never free."""
    if total.told + len(total.predicted) == total.asked:
        return True
    return bool(total.told) and (dearest > 0 or part != COMPUTE)


def foreseen_joules(
    devices: Sequence[str], predicted: Mapping[str, float], dearest: Mapping[str, float]
) -> dict[str, float]:
    """Return the expected joules of each device's next task.

    Args:
        predicted: Predictions by device; others are expected to cost as much as their dearest.
        dearest: Of devices that have reported any; the others get the median, 0 if nobody has.
    """
    usual = statistics.median(dearest.values()) if dearest else 0.0
    return {device: predicted.get(device, dearest.get(device, usual)) for device in devices}


def affordable(foreseen: Mapping[str, float], available: float) -> tuple[str, ...]:
    """Return the cheapest devices that the budget pays for together, sorted by name.

    Args:
        foreseen: Expected joules by device.
        available: Joules that may be spent.
    """
    available += TOLERANCE * max(available, 0.0)
    if math.fsum(foreseen.values()) <= available:
        return tuple(sorted(foreseen))
    chosen, total = list[str](), 0.0
    for device in sorted(foreseen, key=lambda name: (foreseen[name], name)):
        total += foreseen[device]
        if total > available:
            break
        chosen.append(device)
    return tuple(sorted(chosen))


def describe_spent_budget(budget: BudgetPlan, spending: RunSpending) -> str:
    """Return a sentence on the exhausted budget for the journal; empty if none is exhausted."""
    if budget.time_s is not None and spending.seconds >= budget.time_s:
        return f"budget.time_s: {spending.seconds:.6g} s of {budget.time_s:g} s are spent"
    if budget.joules is None or spending.joules is None or spending.joules < (limit := budget.joules + spending.moved):
        return ""
    least, parts = "" if spending.is_whole else "at least ", ""
    if spending.charged:
        parts = f", {spending.charged:.6g} J of them estimated for unreported costs"
    return f"budget.joules: {least}{spending.joules:.6g} J of {limit:g} J are spent{parts}"
