"""Plan, server, store, algorithm and network of a run, for all its parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from edge_server.fleet.hub import Server
from edge_server.fleet.membership import Membership
from edge_server.journal.checkpoints import Store
from edge_server.journal.disk import P, R, retry_write
from edge_server.journal.records import AnyRecord
from edge_server.plan.plan import Plan
from edge_server.plan.server_config import LinkConfig
from shared.algorithms.base import Algorithm
from shared.models.base import Model
from shared.models.running_statistics import statistic_names
from shared.tensors.placement import Device
from shared.tensors.tree import CPU

SMALL_BYTES = 1 << 18
"""Size of the tensors of a calculation up to which handing it to a thread would take longer than the calculation."""


@dataclass(frozen=True)
class ActiveRun:
    """A run while its rounds are performed.

    Attributes:
        model: Without storage; its `example` is the input shape of the server's own data, empty without such data: then
            devices may bring any shape.
        device: Where the server trains and evaluates; states between rounds are on the CPU.
    """

    name: str
    plan: Plan
    server: Server
    store: Store
    algorithm: Algorithm
    link: LinkConfig
    model: Model
    membership: Membership = field(default_factory=Membership)
    device: Device = CPU

    @cached_property
    def has_statistics(self) -> bool:
        """True if the network has running statistics."""
        return bool(statistic_names(self.model.layers))

    async def compute(self, size: int, calculate: Callable[[], R]) -> R:
        """Run a calculation on `size` bytes of tensors, in a thread unless it is small."""
        return calculate() if size <= SMALL_BYTES else await self.server.worker(calculate)

    async def persist(self, write: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Write to the run's store; wait while the disk is full."""
        return await retry_write(self.server.worker, self.store.retry_s, write, *args, **kwargs)

    async def record(self, record: AnyRecord) -> None:
        """Append a record to the run's journal; wait while the disk is full."""
        await self.persist(self.store.append, record)
