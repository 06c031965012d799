"""Costs of tasks as devices report them: settled once the upload is known, bounded to what can be true."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field

from edge_server.journal.records import AnyRecord, CostSettled, UpdateAccepted, valid
from shared.protocol.measurements import Cost, Provenance, Spent
from shared.protocol.messages import Report

MAX_SOURCE = 64
MOST = 1e18
"""No task takes so many seconds, joules, cycles or bytes: who says more is not believed, and sums cannot overflow."""

_FIGURES = tuple(name for name in Cost.__struct_fields__ if name != "provenance")


def plausible(cost: Cost) -> Cost:
    """Return a cost without what cannot be true: figures below zero or beyond `MOST`, sources of figures it has not."""
    figures = {name: value for name in _FIGURES if _is_figure(value := getattr(cost, name))}
    provenance = {
        name: Provenance(source=one.source[:MAX_SOURCE], quality=one.quality, uncertainty=_share(one.uncertainty))
        for name, one in cost.provenance.items()
        if name in figures
    }
    return Cost(**figures, provenance=provenance)


def _is_figure(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and 0 <= value <= MOST


def _share(value: float | None) -> float | None:
    return value if value is not None and _is_figure(value) else None


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
        run: The run.
        rounds: The last round it can have; evaluations have numbers up to twice that, and one.
        append: Records durably.
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
            number: Of the round.
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
    """Return what is known of every task's cost, by round and device; the settled cost stands for the update's."""
    found: dict[int, dict[str, Cost]] = {}
    for record in valid(records):
        match record:
            case UpdateAccepted():
                found.setdefault(record.round, {}).setdefault(record.device, plausible(record.update.cost))
            case CostSettled():
                found.setdefault(record.round, {})[record.device] = record.cost
    return found
