"""Text output of a rollout: progress, a table of its boards, record lines."""

from __future__ import annotations

from collections.abc import Mapping

from edge_server.journal.rollouts.file import (
    AnyRolloutRecord,
    BoardGivenUp,
    BoardReported,
    PartsSent,
    RolloutEnded,
    RolloutOrdered,
    WaveOpened,
)
from edge_server.journal.rollouts.state import Mode, RolloutState, board_rows
from edge_server.release.rollout.waves import join_names
from shared.protocol.units import BYTES, choose_unit
from shared.runtime.text_table import TextColumn, TextTable, printable_text

BAR = 30
NOTHING = "-"
WHEN_BACK: Mapping[Mode, str] = {
    "going": "resume --stay` serves them",
    "going-back": "back --stay` takes it back from them",
    "aborted": "abort --stay` stops their downloads",
}
"""Remedy for boards that were offline, by mode; a rollout that stopped after failures has none."""


def heading_lines(state: RolloutState) -> list[str]:
    """Format a rollout's release, progress and cause of a stop."""
    rows, plan = board_rows(state), state.plan
    done = sum(row.stands == "committed" for row in rows)
    filled = BAR * done // len(rows) if rows else 0
    failed = sum(row.stands == "failed" for row in rows)
    lines = [
        f"{plan.deployment}: {plan.release}, {state.outcome or state.mode}",
        f"[{'#' * filled}{'.' * (BAR - filled)}] {done} of {len(rows)} boards serve it"
        + f", {failed} failed" * bool(failed)
        + f", {size_text(state.sent)} sent" * bool(state.sent),
    ]
    if state.cause:
        lines.append(f"stopped: {printable_text(state.cause)}")
    if state.behind:
        remedy = WHEN_BACK.get(state.mode, "")
        lines.append(
            f"offline: {join_names(state.behind)}{f'; `edge-server rollout {remedy} when they are back' * bool(remedy)}"
        )
    return lines


def boards_table(state: RolloutState) -> TextTable:
    """Return a table with one row for each board."""
    columns = (
        *(TextColumn("device", least=12), TextColumn("profile", least=10), TextColumn("wave", right=True)),
        *(TextColumn("state"), TextColumn("serves", right=True), TextColumn("cause", least=20)),
    )
    rows = [
        (
            *(row.device, row.profile or NOTHING, f"{row.wave}{' canary' if row.canary else ''}"),
            *(row.state or row.stands, str(row.serves or NOTHING), row.reason or NOTHING),
        )
        for row in board_rows(state)
    ]
    return TextTable(columns, rows)


def record_line(state: RolloutState, record: AnyRolloutRecord) -> str:
    """Format a record as a line of progress output; empty for records without user-visible content."""
    line = ""
    match record:
        case WaveOpened():
            kind = "canary" if record.canary else "wave"
            line = f"{kind} {len(state.waves)}: {join_names(tuple(record.devices))}"
        case BoardReported() if record.device in state.offered_boards:
            status = record.status
            text = f"{status.state or 'nothing'} {status.name}/{status.candidate}"
            line = f"{record.device}: {text} {printable_text(status.reason)}".rstrip()
        case BoardGivenUp():
            line = f"{record.device}: given up: {record.cause}"
        case PartsSent():
            line = f"{size_text(record.sent)} sent for {join_names(record.devices)}"
        case RolloutOrdered():
            line = f"{record.order}{': ' + record.cause if record.cause else ''}"
        case RolloutEnded():
            line = f"{record.outcome}{'; offline: ' + join_names(record.behind) if record.behind else ''}"
    return line


def size_text(count: int) -> str:
    """Format a number of bytes in kB, MB or GB."""
    unit = choose_unit(count, BYTES, between=("GB", "kB"))
    return f"{count / unit.size:.1f} {unit.name}"
