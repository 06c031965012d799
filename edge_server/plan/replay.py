"""Plan table `[replay]`: options that only a replay has."""

from __future__ import annotations

from edge_server.plan.sections import Section


class ReplayPlan(Section, frozen=True, kw_only=True):
    """Computation of a replay; live runs ignore it.

    Attributes:
        together: Whether devices of a cohort may be trained in one pass where that is faster. Their models then match
            those of a live run within floating-point rounding, no longer bit for bit.
    """

    together: bool = False
