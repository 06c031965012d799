"""Job queue between virtual time and the processes that train.

A job is handed to the pool when its device begins it. Its duration in virtual seconds is known beforehand, so its
result is collected only when virtual time has reached its end and nothing else remains to be done at that moment. Jobs
that are due are collected one by one in the order in which they were submitted. The order of events is therefore the
same for any number of processes.
"""

from __future__ import annotations

import asyncio
import heapq
from dataclasses import dataclass, field

from edge_server.replay.pool import Ending, Pool, TrainingOrder


@dataclass(eq=False)
class Ticket:
    """Receipt of a submitted job.

    Attributes:
        number: Position in the order of submission, from 1.
        batch: Number of the job's batch; 0 while it has none.
        index: Index in the batch.
        ending: Result of the job; set when `JobQueue.settle` collects it.
    """

    number: int
    order: TrainingOrder
    batch: int = 0
    index: int = 0
    ending: asyncio.Future[Ending] = field(default_factory=asyncio.Future)


class JobQueue:
    """Group jobs into batches and collect results in virtual time.

    Args:
        batch_size: Maximum number of jobs per batch. With 1, a job starts when it is submitted. With more, a batch
            starts when virtual time reaches the end of any waiting job, so that batches depend on virtual time alone.
    """

    def __init__(self, pool: Pool, batch_size: int = 1) -> None:
        self._pool, self._batch_size = pool, batch_size
        self._unbatched: list[Ticket] = []
        self._due: list[tuple[int, Ticket]] = []
        self._batches: dict[int, list[Ticket]] = {}
        self._endings: dict[int, list[Ending]] = {}
        self._last_batch = self._submitted = 0

    def submit(self, order: TrainingOrder) -> Ticket:
        """Queue a job; it starts at once or with its batch."""
        self._submitted += 1
        ticket = Ticket(self._submitted, order)
        self._unbatched.append(ticket)
        if self._batch_size == 1:
            self._form_batches()
        return ticket

    async def await_end(self, ticket: Ticket) -> Ending:
        """Return the result of a job whose virtual time is over."""
        heapq.heappush(self._due, (ticket.number, ticket))
        return await ticket.ending

    def withdraw(self, ticket: Ticket) -> None:
        """Discard a job; after the return, no process writes into its draft."""
        ticket.ending.cancel()
        if ticket in self._unbatched:
            self._unbatched.remove(ticket)
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
        """Block until the next due job is computed and deliver its result; return False if none is due."""
        while self._due and self._due[0][1].ending.done():  # withdrawn
            heapq.heappop(self._due)
        if not self._due:
            return False
        _, ticket = heapq.heappop(self._due)
        if not ticket.batch:
            self._form_batches()
        ticket.ending.set_result(self._endings_of(ticket.batch)[ticket.index])
        self._forget(ticket)
        return True

    def _form_batches(self) -> None:
        parts = -(-len(self._unbatched) // self._batch_size)
        for part in range(parts, 0, -1):
            self._last_batch += 1
            size = -(-len(self._unbatched) // part)  # even sizes, so that no process gets a single job
            batch, self._unbatched = self._unbatched[:size], self._unbatched[size:]
            for index, ticket in enumerate(batch):
                ticket.batch, ticket.index = self._last_batch, index
            self._batches[self._last_batch] = batch
            self._pool.submit_batch(self._last_batch, [ticket.order for ticket in batch])

    def _endings_of(self, batch: int) -> list[Ending]:
        if batch not in self._endings:
            self._endings[batch] = self._pool.wait(batch)
        return self._endings[batch]

    def _forget(self, ticket: Ticket) -> None:
        self._batches[ticket.batch].remove(ticket)
        if not self._batches[ticket.batch]:
            del self._batches[ticket.batch]
            self._endings.pop(ticket.batch, None)
