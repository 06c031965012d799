"""Report section: rollouts of the runs' releases, with boards, waves and causes."""

from __future__ import annotations

from collections.abc import Sequence

from edge_server.journal.rollouts.state import RolloutState, RolloutSummary, summarise
from edge_server.report.digest import amount_or_unknown
from edge_server.report.formatting import format_amount
from edge_server.report.html import Markup, element, join
from edge_server.report.tables import table

MOST_BOARDS = 200
NOTHING = "-"


def rollouts(states: Sequence[RolloutState]) -> Markup:
    """Return the rollouts of releases of the report's runs, earliest first."""
    summaries = [summarise(state) for state in states]
    head = ["rollout", "release", "run", "began", "outcome", "boards", "serving", "failed", "bytes sent", "cause"]
    rows = [
        [
            *(summary.plan.deployment, summary.plan.release, summary.plan.run, summary.started, summary.state),
            *(
                str(count)
                for count in (len(summary.boards), summary.counts.get("committed", 0), summary.counts.get("failed", 0))
            ),
            *(format_amount(amount_or_unknown(float(summary.sent_bytes)), "bytes"), summary.cause or NOTHING),
        ]
        for summary in summaries
    ]
    return join([table(head, rows, class_="texts"), *map(_boards, summaries)])


def _boards(summary: RolloutSummary) -> Markup:
    if not summary.boards:
        return join()
    rows = [
        [
            *(row.device, row.profile or NOTHING, f"{row.wave}{' (canary)' if row.canary else ''}"),
            *(row.state or row.stands, str(row.serves or NOTHING), row.reason or NOTHING),
        ]
        for row in summary.boards[:MOST_BOARDS]
    ]
    more = len(summary.boards) - len(rows)
    note = element("p", f"{more} more boards: see the journal of the rollout.", class_="note") if more > 0 else join()
    head = ["board", "profile", "wave", "state", "serves", "cause"]
    return join([element("h4", f"Boards of {summary.plan.deployment}"), table(head, rows, class_="texts"), note])
