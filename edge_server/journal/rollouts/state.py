"""State of a rollout, replayed from its journal: waves and boards."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from edge_server.journal.rollouts.file import (
    AnyRolloutRecord,
    BoardGivenUp,
    BoardReported,
    Order,
    Outcome,
    PartsSent,
    RolloutEnded,
    RolloutOrdered,
    RolloutPlan,
    RolloutStarted,
    WaveOpened,
    readable_rollouts,
)
from shared.protocol.inference.rollout import ModelStatus
from shared.protocol.update import PENDING

Mode: TypeAlias = Literal["going", "paused", "stopped", "aborted", "going-back"]
Standing: TypeAlias = Literal["waiting", "taking", "trial", "committed", "failed", "superseded"]

FAILED = frozenset({"refused", "rolled-back"})
_MODES: Mapping[Order, Mode] = {
    "pause": "paused",
    "resume": "going",
    "abort": "aborted",
    "back": "going-back",
    "stop": "stopped",
}


@dataclass
class RolloutState:
    """State of a rollout.

    Attributes:
        mode: Result of the last order.
        waves: Profiles of each wave's boards.
        canaries: Indices of the canary waves.
        statuses: Last status of each board.
        before: Version that each board served before this one was offered.
        given_up: Boards that exceeded a time limit, with the cause.
        forgiven: Boards whose failures were known when an operator ordered to resume.
        cause: Of the last automatic order.
        outcome: Of a finished rollout; None before.
        behind: Boards that were offline at the end.
        sent: Bytes of parts passed to the broker.
    """

    plan: RolloutPlan
    mode: Mode = "going"
    waves: list[dict[str, str]] = field(default_factory=list)
    canaries: set[int] = field(default_factory=set)
    statuses: dict[str, ModelStatus] = field(default_factory=dict)
    before: dict[str, int] = field(default_factory=dict)
    given_up: dict[str, str] = field(default_factory=dict)
    forgiven: set[str] = field(default_factory=set)
    cause: str = ""
    outcome: Outcome | None = None
    behind: tuple[str, ...] = ()
    started: str = ""
    ended: str = ""
    sent: int = 0

    @property
    def offered_boards(self) -> dict[str, str]:
        """Boards that were offered the release, with their profiles, in order."""
        return {device: profile for wave in self.waves for device, profile in wave.items()}

    @property
    def failures(self) -> dict[str, str]:
        """Causes of unforgiven failures, by board."""
        failed = (
            device for device in self.offered_boards if self.stands(device, self.statuses.get(device)) == "failed"
        )
        return {device: self.reason(device) for device in failed if device not in self.forgiven}

    def stands(self, device: str, status: ModelStatus | None) -> Standing:
        """Return the standing of a board; one that was given up has failed unless it committed the release."""
        by_status = board_standing(self.plan, status)
        return "failed" if device in self.given_up and by_status != "committed" else by_status

    def reason(self, device: str) -> str:
        """Return why a board failed: its own cause, or that for which it was given up."""
        status = self.statuses.get(device)
        is_its_own = device not in self.given_up or board_standing(self.plan, status) == "failed"
        return (status.reason if status else "") if is_its_own else self.given_up[device]

    def apply(self, record: AnyRolloutRecord) -> None:
        """Apply the next record."""
        match record:
            case WaveOpened():
                self.canaries |= {len(self.waves)} if record.canary else set()
                self.waves.append(record.devices)
                self.outcome = None
                for device in record.devices:
                    status = self.statuses.get(device)
                    self.before.setdefault(device, status.committed if status else 0)
            case BoardReported() if record.status.name == self.plan.name:
                self.statuses[record.device] = record.status
            case BoardGivenUp():
                self.given_up[record.device] = record.cause
            case PartsSent():
                self.sent += record.sent
            case RolloutOrdered():
                self._order(record)
            case RolloutEnded():
                self.outcome, self.behind, self.ended = record.outcome, record.behind, record.at
            case _:
                pass

    def _order(self, record: RolloutOrdered) -> None:
        if record.order == "resume":
            self.forgiven |= self.failures.keys()
        if record.order == "pause" and self.mode != "going":
            return
        self.mode, self.cause, self.outcome = _MODES[record.order], record.cause, None


def fold(records: Iterable[AnyRolloutRecord]) -> RolloutState | None:
    """Return the state described by records; None without a first one."""
    state: RolloutState | None = None
    for record in records:
        if isinstance(record, RolloutStarted):
            state = RolloutState(record.plan, started=record.at)
        elif state:
            state.apply(record)
    return state


def board_standing(plan: RolloutPlan, status: ModelStatus | None) -> Standing:
    """Return a board's standing with a rollout's release from its last status."""
    if status is None:
        return "waiting"
    is_ours = status.deployment == plan.deployment and status.candidate == plan.version
    if is_ours and status.state in FAILED:
        return "failed"
    if is_ours and status.state in ("trial", "superseded"):
        return "trial" if status.state == "trial" else "superseded"
    if status.committed == plan.version:
        return "committed"
    return "taking" if is_ours and status.state in PENDING else "waiting"


class BoardRow(msgspec.Struct, frozen=True, kw_only=True):
    """A board of a rollout.

    Attributes:
        profile: Id of its firmware profile.
        wave: From 1.
        canary: Whether it was in a canary wave.
        stands: `waiting`, `taking`, `trial`, `committed`, `failed` or `superseded`.
        state: As reported by the board.
        serves: Version that it serves; 0 for none or unknown.
    """

    device: str
    profile: str
    wave: int
    canary: bool
    stands: str
    state: str = ""
    serves: int = 0
    reason: str = ""


class RolloutSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout in JSON.

    Attributes:
        state: The outcome, or the mode before it: `going`, `paused`, `going-back`.
        counts: Number of boards by standing.
        boards: Boards that were offered the release.
        behind: Boards that were offline at the end.
        sent_bytes: Bytes of parts passed to the broker.
        ended: Calendar time; empty before the end.
    """

    plan: RolloutPlan
    state: str
    cause: str
    counts: dict[str, int]
    boards: list[BoardRow]
    behind: tuple[str, ...]
    sent_bytes: int
    started: str
    ended: str = ""


def board_rows(state: RolloutState) -> list[BoardRow]:
    """Return the boards that were offered the release, by wave."""
    rows = []
    for number, wave in enumerate(state.waves):
        for device, profile in wave.items():
            status = state.statuses.get(device)
            stands = state.stands(device, status)
            rows.append(
                BoardRow(
                    device=device,
                    profile=profile,
                    wave=number + 1,
                    canary=number in state.canaries,
                    stands=stands,
                    state=status.state if status else "",
                    serves=status.committed if status else 0,
                    reason=state.reason(device) if stands in ("failed", "superseded") else "",
                )
            )
    return rows


def summarise(state: RolloutState) -> RolloutSummary:
    """Return a rollout for scripts."""
    rows = board_rows(state)
    return RolloutSummary(
        plan=state.plan,
        state=state.outcome or state.mode,
        cause=state.cause,
        counts={stands: sum(row.stands == stands for row in rows) for stands in sorted({row.stands for row in rows})},
        boards=rows,
        behind=state.behind,
        sent_bytes=state.sent,
        started=state.started,
        ended=state.ended if state.outcome else "",
    )


def rollouts_of(data_dir: Path, runs: Collection[str]) -> list[RolloutState]:
    """Return the rollouts of these runs' releases, oldest first; damaged journals are logged and skipped."""
    states = (fold(records) for records in readable_rollouts(data_dir))
    return [state for state in states if state and state.plan.run in runs]
