"""Task costs reported by devices, recorded once per round and device."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from edge_server.journal.claims import drop_figures, drop_implausible, find_rejected_figures
from edge_server.journal.records import (
    AnyRecord,
    CostSettled,
    RoundClosed,
    RunOpened,
    UpdateAccepted,
    enumerate_valid,
    first,
    read_numbers,
    select,
    valid_records,
)
from shared.protocol.measurements import Cost, TaskCost
from shared.protocol.messages import Report, Update

SETTLE_S = 2.0
"""Seconds that a finished run waits for the costs of its last uploads."""


@dataclass
class Costs:
    """Records the final costs of a run's tasks from the devices' reports, each once.

    Reports are retained messages and arrive again after every restart. A device reports ever later rounds and,
    separately, evaluations, whose numbers lie beyond the rounds. So a cost no later than the device's last one is
    dropped, and so is the cost of a voided round, which is not that of its repetition.

    Attributes:
        rounds: Last possible round; evaluations have numbers up to twice that plus one.
        last: Last recorded round of each device.
        evaluated: Last recorded evaluation of each device.
    """

    run: str
    rounds: int
    extend: Callable[[Sequence[CostSettled]], Awaitable[None]]
    last: dict[str, int] = field(default_factory=dict)
    evaluated: dict[str, int] = field(default_factory=dict)
    _recorded: dict[str, CostSettled] = field(default_factory=dict)
    _heard: asyncio.Queue[CostSettled] = field(default_factory=asyncio.Queue)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def recall(self, records: Sequence[AnyRecord]) -> None:
        """Restore the state from a run's journal."""
        self._recorded = {record.device: record for record in select(records, CostSettled)}
        for record in valid_records(records, CostSettled):
            last = self._last(record.round)
            last[record.device] = max(record.round, last.get(record.device, record.round))

    def repeat(self, number: int) -> None:
        """Accept the costs of a repeated round again."""
        self.last = {device: min(last, number - 1) for device, last in self.last.items()}

    def hear(self, report: Report) -> None:
        """Queue the costs in a report that belong to this run."""
        for spending in [*report.earlier, *([report.spent] if report.spent else [])]:
            if spending.run == self.run:
                self._take(report.device, spending)

    def _last(self, number: int) -> dict[str, int]:
        return self.last if number <= self.rounds else self.evaluated

    def _take(self, device: str, spending: TaskCost) -> None:
        last = self._last(spending.round)
        if not last.get(device, -1) < spending.round <= 2 * self.rounds + 1:
            return
        record = CostSettled(round=spending.round, device=device, cost=drop_implausible(spending.cost))
        if record == self._recorded.get(device):
            return
        last[device] = spending.round
        self._changed.set()
        self._heard.put_nowait(record)

    async def keep(self) -> None:
        """Record queued costs, all that wait in one transaction, until cancelled."""
        while True:
            batch = [await self._heard.get()]
            while not self._heard.empty():
                batch.append(self._heard.get_nowait())
            await self.extend(batch)
            for _ in batch:
                self._heard.task_done()

    async def wait_recorded(self, number: int, devices: Collection[str], patience_s: float = SETTLE_S) -> None:
        """Wait until the costs of a round are recorded, at most `patience_s`; missing ones stay unknown."""
        try:
            async with asyncio.timeout(patience_s):
                while any(self.last.get(device, -1) < number for device in devices):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass  # its figures stay unknown
        await self._heard.join()


class RoundCosts(Mapping[int, dict[str, Cost]]):
    """Costs of all tasks by round and device, read from the journal a round at a time."""

    def __init__(self, records: Sequence[AnyRecord]) -> None:
        self._records, self._rejected = records, find_rejected_figures(records)
        self._numbers: dict[int, array[int]] = {}
        for number, record in enumerate_valid(records, UpdateAccepted, CostSettled):
            if isinstance(record, UpdateAccepted | CostSettled):
                self._numbers.setdefault(record.round, array("Q")).append(number)
        self._last: tuple[int, dict[str, Cost], dict[str, Update]] | None = None

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, number: int) -> dict[str, Cost]:
        return self._read(number)[0]

    def updates(self, number: int) -> dict[str, Update]:
        """Return the updates of a round by device."""
        return self._read(number)[1] if number in self._numbers else {}

    def _read(self, number: int) -> tuple[dict[str, Cost], dict[str, Update]]:
        if self._last is not None and self._last[0] == number:
            return self._last[1:]
        costs, updates = dict[str, Cost](), dict[str, Update]()
        for record in read_numbers(self._records, self._numbers[number]):
            match record:
                case UpdateAccepted():
                    updates[record.device] = record.update
                    costs.setdefault(record.device, drop_implausible(record.update.cost))
                case CostSettled():
                    costs[record.device] = record.cost
        costs = {device: self._drop_rejected((number, device), cost) for device, cost in costs.items()}
        self._last = number, costs, updates
        return costs, updates

    def _drop_rejected(self, task: tuple[int, str], cost: Cost) -> Cost:
        if not (rejected := self._rejected.get(task)):
            return cost
        return drop_figures(cost, [name for name, value in rejected.items() if getattr(cost, name) == value])


def costs_by_round(records: Sequence[AnyRecord]) -> RoundCosts:
    """Return the costs of all tasks by round and device; the final cost replaces the update's.

    Implausible values are left out: see `edge_server.journal.claims`.
    """
    return RoundCosts(records)


def statistics_by_round(records: Sequence[AnyRecord]) -> dict[int, dict[str, Cost]]:
    """Return the cost of re-measuring running statistics, by preceding round and device."""
    opening = first(records, RunOpened)
    last = opening.plan.rounds if opening else 0
    ends = valid_records(records, RoundClosed)
    measured = [record.round for record in ends if record.statistics_batches is not None]
    costs: Mapping[int, dict[str, Cost]] = costs_by_round(records) if measured else {}
    return {number: costs.get(last + 1 + number, {}) for number in measured}
