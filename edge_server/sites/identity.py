"""Identity of a site in a run, and its services."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from edge_server.allocation.inputs import Case
from edge_server.journal.decision import Decision
from edge_server.journal.records import AnyRecord
from shared.runtime.clock import Clock
from shared.runtime.executor import Worker
from shared.transfer.receiver import Policy

OFFER_S = 2.0
"""Seconds between two offers of a model whose edge is not settled yet."""

Keep: TypeAlias = Callable[[AnyRecord], Awaitable[None]]
"""Journals a record; durable once it returns."""


@dataclass(frozen=True)
class SiteIdentity:
    """Identity of one site in a run.

    Attributes:
        order: All sites, in the plan's order.
        deadline_s: Seconds to wait for other sites.
    """

    site: str
    order: tuple[str, ...]
    run: str
    folder: Path
    deadline_s: float

    def owns(self, peer: str) -> bool:
        """Return true if this site settles the edge to a neighbour."""
        return self.order.index(self.site) < self.order.index(peer)


@dataclass(frozen=True)
class SiteServices:
    """Services that a site uses for joint runs.

    Attributes:
        decide_case: Decides a case by the plan's optimizer.
        policy: Limits for receiving models.
        clock: Time source, in monotonic seconds.
        worker: Runs computations and file writes off the event loop.
    """

    keep: Keep
    decide_case: Callable[[Case], Decision]
    policy: Policy
    clock: Clock
    worker: Worker
