"""Costs of tasks as devices report them: settled once the upload is known, by round and device."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from edge_server.journal.claims import doubted_figures, plausible, without
from edge_server.journal.records import AnyRecord, CostSettled, RunOpened, UpdateAccepted, closed_rounds, valid
from shared.protocol.measurements import Cost, Spent
from shared.protocol.messages import Report

SETTLE_S = 2.0
"""How long a run that has ended waits for what its last uploads cost."""


@dataclass
class Costs:
    """Takes the settled costs of a run from the devices' reports into its journal, each once.

    A report is retained, so that it is heard again after every restart. What a device settles are later and later
    rounds, and beside them later and later evaluations, which are numbered beyond the rounds: one that is no later than
    what is recorded of that device is not taken. Nor is the cost of a round that was made void, which is not that of
    its repetition.

    Attributes:
        rounds: The last round it can have; evaluations have numbers up to twice that, and one.
        last: The last round that is recorded of each device.
        evaluated: Likewise the last evaluation.
    """

    run: str
    rounds: int
    append: Callable[[CostSettled], Awaitable[None]]
    last: dict[str, int] = field(default_factory=dict)
    evaluated: dict[str, int] = field(default_factory=dict)
    _recorded: dict[str, CostSettled] = field(default_factory=dict)
    _heard: asyncio.Queue[CostSettled] = field(default_factory=asyncio.Queue)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def recall(self, records: Iterable[AnyRecord]) -> None:
        """Learn from a run's journal what is recorded already."""
        every = list(records)
        self._recorded = {record.device: record for record in every if isinstance(record, CostSettled)}
        for record in valid(every):
            if isinstance(record, CostSettled):
                last = self._last(record.round)
                last[record.device] = max(record.round, last.get(record.device, record.round))

    def repeat(self, number: int) -> None:
        """Take what devices settle of a round that is done again, beside what they settled of it before."""
        self.last = {device: min(last, number - 1) for device, last in self.last.items()}

    def hear(self, report: Report) -> None:
        """Take what a report says of tasks of this run."""
        for spent in [*report.earlier, *([report.spent] if report.spent else [])]:
            if spent.run == self.run:
                self._take(report.device, spent)

    def _last(self, number: int) -> dict[str, int]:
        return self.last if number <= self.rounds else self.evaluated

    def _take(self, device: str, spent: Spent) -> None:
        last = self._last(spent.round)
        if not last.get(device, -1) < spent.round <= 2 * self.rounds + 1:
            return
        settled = CostSettled(round=spent.round, device=device, cost=plausible(spent.cost))
        if settled == self._recorded.get(device):
            return
        last[device] = spent.round
        self._changed.set()
        self._heard.put_nowait(settled)

    async def keep(self) -> None:
        """Record what is heard, until cancelled."""
        while True:
            await self.append(await self._heard.get())
            self._heard.task_done()

    async def settled(self, number: int, devices: Collection[str], patience_s: float = SETTLE_S) -> None:
        """Wait until the costs of a round are recorded; of those devices that are too slow, no longer than that.

        Args:
            devices: Whose costs are waited for.
            patience_s: Seconds after which they stay unknown.
        """
        try:
            async with asyncio.timeout(patience_s):
                while any(self.last.get(device, -1) < number for device in devices):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass  # its figures stay unknown
        await self._heard.join()


def by_round(records: Iterable[AnyRecord]) -> dict[int, dict[str, Cost]]:
    """Return what is known of every task's cost, by round and device; the settled cost stands for the update's.

    Figures that are not believed are not among it: see `edge_server.journal.claims`.
    """
    every, found = list(records), dict[int, dict[str, Cost]]()
    for record in valid(every):
        match record:
            case UpdateAccepted():
                found.setdefault(record.round, {}).setdefault(record.device, plausible(record.update.cost))
            case CostSettled():
                found.setdefault(record.round, {})[record.device] = record.cost
    for (number, device), doubted in doubted_figures(every).items():
        if cost := found.get(number, {}).get(device):
            found[number][device] = without(
                cost, [name for name, told in doubted.items() if getattr(cost, name) == told]
            )
    return found


def statistics_by_round(records: Sequence[AnyRecord]) -> dict[int, dict[str, Cost]]:
    """Return what measuring running statistics after a round cost, by that round and device; see `by_round`.

    Args:
        records: A run's journal.
    """
    costs, last = by_round(records), max((one.plan.rounds for one in records if isinstance(one, RunOpened)), default=0)
    measured = [one.round for one in closed_rounds(records) if one.statistics_batches is not None]
    return {number: costs.get(last + 1 + number, {}) for number in measured}
