"""Which boards serve a run's model: its releases that were rolled out, wave by wave, and why boards refused one."""

from __future__ import annotations

from collections.abc import Sequence

from edge_server.journal.rollouts.state import RolloutState, RolloutSummary, summarise
from edge_server.report.digest import known_amount
from edge_server.report.formatting import amount
from edge_server.report.html import Markup, element, joined
from edge_server.report.tables import table

MOST_BOARDS = 200
NOTHING = "-"


def rollouts(states: Sequence[RolloutState]) -> Markup:
    """Return the rollouts of releases of a report's runs, the first begun first."""
    found = [summarise(state) for state in states]
    head = ["rollout", "release", "run", "began", "outcome", "boards", "serve it", "failed", "bytes sent", "cause"]
    rows = [
        [
            *(one.plan.deployment, one.plan.release, one.plan.run, one.started, one.state),
            *(str(count) for count in (len(one.boards), one.counts.get("committed", 0), one.counts.get("failed", 0))),
            *(amount(known_amount(float(one.sent_bytes)), "bytes"), one.cause or NOTHING),
        ]
        for one in found
    ]
    return joined(table(head, rows, class_="texts"), *map(_boards, found))


def _boards(one: RolloutSummary) -> Markup:
    if not one.boards:
        return joined()
    rows = [
        [
            *(row.device, row.profile or NOTHING, f"{row.wave}{' (canary)' if row.canary else ''}"),
            *(row.state or row.stands, str(row.serves or NOTHING), row.reason or NOTHING),
        ]
        for row in one.boards[:MOST_BOARDS]
    ]
    more = len(one.boards) - len(rows)
    note = element("p", f"{more} more boards are in its journal.", class_="note") if more > 0 else joined()
    head = ["board", "profile", "wave", "state", "serves", "cause"]
    return joined(element("h4", f"Boards of {one.plan.deployment}"), table(head, rows, class_="texts"), note)
