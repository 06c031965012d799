"""Plan table `[budget]`: limits of time and energy for the whole run."""

from __future__ import annotations

import math

from edge_server.plan.sections import Section


class BudgetPlan(Section, frozen=True, kw_only=True):
    """Limits of the whole run; absent: no limit.

    A run, live or replayed, ends after the round that reaches a budget (`journal.budget` defines what counts). A round
    whose tasks would take more joules than remain starts with fewer devices, the cheapest, or not at all; earlier tasks
    predict what a device's task takes, so that a first round starts with all devices. Evaluations on devices are
    charged too, and skipped if less remains than the last evaluation took. A replay whose devices cannot meet a budget
    at all is refused before it starts.

    Attributes:
        time_s: Time of all rounds together, including the wait for devices.
        joules: Energy of all devices together, idle power included, while they download, compute, exchange features and
            gradients, and upload. A device that reports no energy takes no part after its first task.
    """

    time_s: float | None = None
    joules: float | None = None

    def __post_init__(self) -> None:
        """Reject limits that are zero, negative or infinite."""
        if not all(limit is None or 0 < limit < math.inf for limit in (self.time_s, self.joules)):
            raise ValueError("time_s and joules must be > 0 and finite; leave them out for no limit")
