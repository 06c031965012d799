"""Report section: rollouts of the runs' releases, with boards, waves and causes."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from edge_server.journal.rollouts.state import RolloutState, RolloutSummary, summarise
from edge_server.record.amounts import amount_or_unknown
from edge_server.report.formatting import format_amount
from edge_server.report.html import render
from edge_server.report.tables import table

MOST_BOARDS = 200
NOTHING = "-"


def rollouts(states: Sequence[RolloutState]) -> Markup:
    """Return the rollouts of releases of the report's runs, earliest first."""
    summaries = [summarise(state) for state in states]
    head = ["rollout", "release", "run", "began", "outcome", "boards", "serving", "failed", "bytes sent", "cause"]
    rows = []
    for summary in summaries:
        counts = (len(summary.boards), summary.counts.get("committed", 0), summary.counts.get("failed", 0))
        sent = format_amount(amount_or_unknown(float(summary.sent_bytes)), "bytes")
        plan = summary.plan
        names = (plan.deployment, plan.release, plan.run, summary.started, summary.state)
        rows.append([*names, *map(str, counts), sent, summary.cause or NOTHING])
    boards = {summary.plan.deployment: _boards(summary) for summary in summaries if summary.boards}
    more = {summary.plan.deployment: len(summary.boards) - MOST_BOARDS for summary in summaries}
    return render("rollouts.html", rollouts=table(head, rows, "texts"), boards=boards, more=more)


def _boards(summary: RolloutSummary) -> Markup:
    rows = []
    for row in summary.boards[:MOST_BOARDS]:
        wave = f"{row.wave}{' (canary)' if row.canary else ''}"
        rows.append(
            [
                row.device,
                row.profile or NOTHING,
                wave,
                row.state or row.stands,
                str(row.serves or NOTHING),
                row.reason or NOTHING,
            ]
        )
    return table(["board", "profile", "wave", "state", "serves", "cause"], rows, "texts")
