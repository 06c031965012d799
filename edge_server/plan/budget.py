"""Plan table `[budget]`: limits of time and energy for the whole run."""

from __future__ import annotations

import math

from edge_server.plan.sections import Section


class BudgetPlan(Section, frozen=True, kw_only=True):
    """What the whole run may take; absent for no limit.

    A run, live or replayed, ends after the round that reaches a budget (`journal.budget` says what is counted). A round
    whose tasks would take more joules than are left is begun with fewer devices, the cheapest, or not at all; what
    a device's task takes is told by its earlier ones, so that a first round is begun whole. What devices evaluate is
    charged as well, and left out where less is left than the last evaluation took. A replay whose devices cannot keep
    to a budget at all says so before it begins.

    Attributes:
        time_s: Time of all rounds together, with waiting for devices.
        joules: Energy of all devices together, idle power included, while they download, compute, exchange features and
            gradients, and upload. A device that reports none takes no part after its first task.
    """

    time_s: float | None = None
    joules: float | None = None

    def __post_init__(self) -> None:
        """Refuse what nobody could keep to."""
        if not all(limit is None or 0 < limit < math.inf for limit in (self.time_s, self.joules)):
            raise ValueError("time_s and joules must be > 0 and finite; leave them out for no limit")
