"""Plan table `[replay]`: options that only a replay has."""

from __future__ import annotations

from edge_server.plan.sections import Section


class ReplayPlan(Section, frozen=True, kw_only=True):
    """How a replay computes; a live run does not ask.

    Attributes:
        together: Whether devices of a cohort may be trained in one pass where that is faster. Their models then agree
            with a live run's within the rounding of floats, no longer bit for bit.
    """

    together: bool = False
