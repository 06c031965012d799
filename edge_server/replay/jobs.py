"""Jobs between virtual time and the processes that do them.

A job is given away when its device begins it. What it takes in virtual seconds is known beforehand, so its result is
asked for only when that time has come and nothing else is left to do at that moment: one result after the other, of
those that are due the job first that was begun first. So the same happens in the same order, however many processes
there are.

What is done with an order: the same training as on a device, at a cost that is given.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from device_agent.measurement.task_meter import GivenMeter
from device_agent.trainer.interface import Job
from device_agent.trainer.task import perform, read_parameters
from device_agent.trainer.workspace import Workspace
from edge_server.replay.pool import Ending, Pool, TrainingOrder
from edge_server.replay.stacked_training import correction_of, stack_networks, train
from shared.algorithms import ALGORITHMS
from shared.algorithms.base import Result
from shared.data.cache import DataCache
from shared.errors import FieldFleetError
from shared.protocol.messages import Task
from shared.registry import FAULTS, build

log = logging.getLogger(__name__)
FAILURES = (FieldFleetError, MemoryError, *FAULTS)
"""What a trainer's process reports as its task's."""


@dataclass(eq=False)
class Ticket:
    """One job under way.

    Attributes:
        number: Of the job, in the order in which they were submitted.
        batch: The number of its batch; 0 before it is in one.
        place: Where in the batch it is.
        ended: How it ended, as soon as that was asked for.
    """

    number: int
    order: TrainingOrder
    batch: int = 0
    place: int = 0
    ended: asyncio.Future[Ending] = field(default_factory=asyncio.Future)


class Jobs:
    """Forms batches, and settles jobs as they come due.

    Args:
        together: Most jobs in a batch. With one, a job is begun when it is submitted; with more, as soon as virtual
            time reaches the end of any of those that wait, so that batches are a function of virtual time alone.
    """

    def __init__(self, pool: Pool, together: int = 1) -> None:
        self._pool, self._together = pool, together
        self._loose: list[Ticket] = []
        self._due: list[tuple[int, Ticket]] = []
        self._batches: dict[int, list[Ticket]] = {}
        self._endings: dict[int, list[Ending]] = {}
        self._last = self._submitted = 0

    def submit(self, order: TrainingOrder) -> Ticket:
        """Begin a job, now or with others that are due together."""
        self._submitted += 1
        ticket = Ticket(self._submitted, order)
        self._loose.append(ticket)
        if self._together == 1:
            self._form()
        return ticket

    async def ended(self, ticket: Ticket) -> Ending:
        """Return how a job has ended, whose virtual time is over."""
        heapq.heappush(self._due, (ticket.number, ticket))
        return await ticket.ended

    def withdraw(self, ticket: Ticket) -> None:
        """Forget a job; nobody writes into its draft any more when this returns."""
        ticket.ended.cancel()
        if ticket in self._loose:
            self._loose.remove(ticket)
            return
        members = self._batches.get(ticket.batch, [])
        if ticket not in members:
            return
        if members == [ticket] and ticket.batch not in self._endings:
            self._pool.drop(ticket.batch)
        else:
            self._endings_of(ticket.batch)
        self._forget(ticket)

    def settle(self) -> bool:
        """Wait for the next job that is due, if there is one; tell whether there was."""
        while self._due and self._due[0][1].ended.done():  # it was withdrawn
            heapq.heappop(self._due)
        if not self._due:
            return False
        _, ticket = heapq.heappop(self._due)
        if not ticket.batch:
            self._form()
        ticket.ended.set_result(self._endings_of(ticket.batch)[ticket.place])
        self._forget(ticket)
        return True

    def _form(self) -> None:
        parts = -(-len(self._loose) // self._together)
        for part in range(parts, 0, -1):
            self._last += 1
            size = -(-len(self._loose) // part)  # as even as can be: no process is left with one job
            batch, self._loose = self._loose[:size], self._loose[size:]
            for place, ticket in enumerate(batch):
                ticket.batch, ticket.place = self._last, place
            self._batches[self._last] = batch
            self._pool.give(self._last, [ticket.order for ticket in batch])

    def _endings_of(self, batch: int) -> list[Ending]:
        if batch not in self._endings:
            self._endings[batch] = self._pool.wait(batch)
        return self._endings[batch]

    def _forget(self, ticket: Ticket) -> None:
        self._batches[ticket.batch].remove(ticket)
        if not self._batches[ticket.batch]:
            del self._batches[ticket.batch]
            self._endings.pop(ticket.batch, None)


class Desk:
    """Does orders for whatever device; keeps the data set and one network.

    Args:
        together: Whether jobs of one batch may be trained in one pass; else one after the other, as on the devices.
    """

    def __init__(self, shelf: DataCache, *, together: bool = False) -> None:
        self._workspace, self._may = Workspace(read=shelf.load), together

    def do(self, orders: Sequence[TrainingOrder]) -> list[Ending]:
        """Leave the update of every order in its draft; return how each ended."""
        trained = self._together([order.job for order in orders]) if self._may else {}
        return [self._one(order, trained.get(place)) for place, order in enumerate(orders)]

    def _one(self, order: TrainingOrder, trained: Result | None) -> Ending:
        meter = GivenMeter(order.spent, order.step)
        try:
            perform(order.job, self._workspace, meter.task, lambda: False, trained=trained)
        except FAILURES as error:
            return f"{type(error).__name__}: {error}"
        return None

    def _together(self, jobs: Sequence[Job]) -> dict[int, Result]:
        """Train those in one pass that begin with the same parameters and do the same; return results by place."""
        alike = defaultdict[bytes, list[int]](list)
        for place, job in enumerate(jobs):
            if job.task.train:
                alike[_kind(job.task)].append(place)
        results: dict[int, Result] = {}
        for places in alike.values():
            if len(places) > 1:
                results |= zip(places, self._pass([jobs[place] for place in places]), strict=False)
        return results

    def _pass(self, jobs: Sequence[Job]) -> list[Result]:
        """Train devices at once; nothing where that cannot be, whatever the reason: each then says it for itself."""
        task = jobs[0].task
        try:
            algorithm, model = build(ALGORITHMS, task.algorithm, "algorithm"), self._workspace.model(task.model)
            is_sgd, correct = correction_of(algorithm)
            own = [self._workspace.batches(job.data, job.task.assignment, lambda: False) for job in jobs]
            network = stack_networks(model.layers, own[0].examples.inputs.shape[1:])
            if not is_sgd or network is None:
                return []
            start = read_parameters(jobs[0], self._workspace, algorithm)
            return train(network, start, own, task.assignment.hyper, correct)
        except FAILURES as error:
            log.warning("round %d: trained one by one, because together: %s", task.round, error)
            return []


def _kind(task: Task) -> bytes:
    return msgspec.msgpack.encode((task.run, task.params, task.algorithm, task.model, task.assignment.hyper))
