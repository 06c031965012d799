"""What the records of a rollout come to: its boards and how each stands, for who goes on with it and for who looks."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from edge_server.journal.rollouts.file import (
    AnyRolloutRecord,
    BoardGivenUp,
    BoardTold,
    Order,
    Outcome,
    PartsSent,
    RolloutEnded,
    RolloutOrdered,
    RolloutPlan,
    RolloutStarted,
    WaveOpened,
    read_rollout,
    rollout_names,
)
from shared.errors import CorruptFile
from shared.protocol.inference.rollout import ModelStatus

log = logging.getLogger(__name__)

Mode: TypeAlias = Literal["going", "paused", "stopped", "aborted", "going-back"]
Standing: TypeAlias = Literal["waiting", "taking", "trial", "committed", "failed", "superseded"]

FAILED = frozenset({"refused", "rolled-back"})
PENDING = frozenset({"offered", "fetched", "verified", "staged"})
_MODES: Mapping[Order, Mode] = {
    "pause": "paused",
    "resume": "going",
    "abort": "aborted",
    "back": "going-back",
    "stop": "stopped",
}


@dataclass
class RolloutState:
    """What a rollout's records come to.

    Attributes:
        plan: What it is to do.
        mode: What was ordered last.
        waves: The boards of each wave with their profiles.
        canaries: Numbers of those waves that were canaries, from 0.
        told: What each of its boards said last.
        before: The version that each of them served before it was offered this one.
        given_up: Boards that took longer than they may, and over what.
        forgiven: Boards whose failures were known when somebody ordered to go on.
        cause: Of the last order that nobody gave.
        outcome: Of a rollout that is over; None while there is something to do.
        behind: Boards that were away at the end.
        sent: Bytes of parts that were handed to the broker.
    """

    plan: RolloutPlan
    mode: Mode = "going"
    waves: list[dict[str, str]] = field(default_factory=list)
    canaries: set[int] = field(default_factory=set)
    told: dict[str, ModelStatus] = field(default_factory=dict)
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
    def taken(self) -> dict[str, str]:
        """The boards that were offered it, with their profiles, in order."""
        return {device: profile for wave in self.waves for device, profile in wave.items()}

    @property
    def failures(self) -> dict[str, str]:
        """Why boards failed that nobody has forgiven, by name."""
        failed = (device for device in self.taken if self.stands(device, self.told.get(device)) == "failed")
        return {device: self.reason(device) for device in failed if device not in self.forgiven}

    def stands(self, device: str, status: ModelStatus | None) -> Standing:
        """Return how a board stands with the release; one that was given up has failed, unless it has committed it.

        Args:
            status: What it said last.
        """
        found = standing(self.plan, status)
        return "failed" if device in self.given_up and found != "committed" else found

    def reason(self, device: str) -> str:
        """Return why a board failed, by its own word, or by ours where it was given up."""
        told = self.told.get(device)
        is_its_own = device not in self.given_up or standing(self.plan, told) == "failed"
        return (told.reason if told else "") if is_its_own else self.given_up[device]

    def apply(self, record: AnyRolloutRecord) -> None:
        """Take the next record."""
        match record:
            case WaveOpened():
                self.canaries |= {len(self.waves)} if record.canary else set()
                self.waves.append(record.devices)
                self.outcome = None
                for device in record.devices:
                    known = self.told.get(device)
                    self.before.setdefault(device, known.committed if known else 0)
            case BoardTold() if record.status.name == self.plan.name:
                self.told[record.device] = record.status
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
    """Return what records come to; None where there is not even the first."""
    found: RolloutState | None = None
    for record in records:
        if isinstance(record, RolloutStarted):
            found = RolloutState(record.plan, started=record.at)
        elif found:
            found.apply(record)
    return found


def standing(plan: RolloutPlan, status: ModelStatus | None) -> Standing:
    """Return how a board stands with a rollout's release, by what it said last."""
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
        canary: Whether it was one of the first.
        stands: `waiting`, `taking`, `trial`, `committed`, `failed` or `superseded`.
        state: What the board says.
        serves: The version that it serves; 0 for none, or where it has said nothing.
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
        plan: What it is to do.
        state: The outcome, or what is under way: `going`, `paused`, `going-back`.
        counts: Boards by how they stand.
        boards: That were offered the release.
        behind: Boards that were away at the end.
        sent_bytes: Of parts, handed to the broker.
        ended: Likewise; empty while it is under way.
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
    """Return the boards that were offered the release, in the order of the waves."""
    rows = []
    for number, wave in enumerate(state.waves):
        for device, profile in wave.items():
            told = state.told.get(device)
            stands = state.stands(device, told)
            rows.append(
                BoardRow(
                    device=device,
                    profile=profile,
                    wave=number + 1,
                    canary=number in state.canaries,
                    stands=stands,
                    state=told.state if told else "",
                    serves=told.committed if told else 0,
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
        counts={one: sum(row.stands == one for row in rows) for one in sorted({row.stands for row in rows})},
        boards=rows,
        behind=state.behind,
        sent_bytes=state.sent,
        started=state.started,
        ended=state.ended if state.outcome else "",
    )


def rollouts_of(data_dir: Path, runs: Collection[str]) -> list[RolloutState]:
    """Return the rollouts of these runs' releases, oldest first; damaged journals are reported and skipped."""
    found = []
    for name in rollout_names(data_dir):
        try:
            state = fold(read_rollout(data_dir, name))
        except CorruptFile as error:
            log.warning("%s", error)
            continue
        if state and state.plan.run in runs:
            found.append(state)
    return found
