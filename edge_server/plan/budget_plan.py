"""The table `[budget]` of a plan: what a whole run may take."""

from __future__ import annotations

import math

from edge_server.plan.sections import Section


class BudgetPlan(Section, frozen=True, kw_only=True):
    """What the whole run may take; absent for no limit.

    A run, live or replayed, ends after the round that reaches a budget (`edge_server.journal.budget` says what is counted).
    A replay whose devices cannot keep to it at all says so before it begins.

    Attributes:
        time_s: Seconds of its rounds together, waiting for devices included.
        joules: Of all devices together. One that tells none takes no part after its first task.
    """

    time_s: float | None = None
    joules: float | None = None

    def __post_init__(self) -> None:
        """Refuse what nobody could keep to."""
        if not all(limit is None or 0 < limit < math.inf for limit in (self.time_s, self.joules)):
            raise ValueError("time_s and joules must be > 0 and finite; leave them out for no limit")
