"""Report section: rollouts of the runs' releases, with boards, waves and causes."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from edge_server.journal.rollouts.state import RolloutState, summarise
from edge_server.report.html import render

MOST_BOARDS = 200


def rollouts(states: Sequence[RolloutState]) -> Markup:
    """Return the rollouts of releases of the report's runs, earliest first."""
    return render("rollouts.html", summaries=list(map(summarise, states)), most=MOST_BOARDS)
