"""Drive a rollout: hear the boards, decide, write it down, offer; killed at any moment, it goes on from its journal.

Nothing is said to a board before it stands in the journal, and nothing that was said need arrive: an offer is made
again whenever a board is born, and now and then, until the board says how it stands with it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime

from edge_server.fleet.admission import Admission
from edge_server.fleet.record_limiter import RecordLimiter
from edge_server.fleet.state import Fleet
from edge_server.fleet.subscriptions import Subscriptions
from edge_server.journal.rollouts.file import (
    AnyRolloutRecord,
    BoardGivenUp,
    BoardTold,
    PartsSent,
    RolloutEnded,
    RolloutJournal,
    RolloutOrdered,
    RolloutPlan,
    WaveOpened,
)
from edge_server.journal.rollouts.state import RolloutState
from edge_server.release.rollout.agents import StoredAgent
from edge_server.release.rollout.parts_out import PartsOut
from edge_server.release.rollout.patience import Patience, TimeLimit, time_limits
from edge_server.release.rollout.waves import (
    MOST_NAMED,
    AwaitBoards,
    Board,
    ChangeCourse,
    Decision,
    EndRollout,
    OpenWave,
    decide,
)
from edge_server.release.rollout.words import due_words, fetching, preparing
from edge_server.release.store import StoredRelease
from shared.errors import Unreachable, WireError
from shared.protocol import wire
from shared.protocol.clip import clip
from shared.protocol.inference.bundle import parse_lacks
from shared.protocol.inference.rollout import Ahead, Lacks, ModelStatus, Offer, Releases, Withdraw
from shared.protocol.messages import Message, Report, Status, Want
from shared.protocol.topics import parse_channel, parse_device, topic
from shared.runtime.clock import Clock, utc_seconds, utc_stamp
from shared.runtime.executor import Worker, background
from shared.transport.base import Delivery, Transport

log = logging.getLogger(__name__)

CHANNELS: Mapping[str, int] = {
    "status": 4 << 10,
    "report": 256 << 10,
    "release": 64 << 10,
    "agent": 64 << 10,
    "lacks": 64 << 10,
}
"""What is heard of boards, and the longest message of each."""
MODELS, AGENTS = ("release", "offer"), ("agent", "upgrade")
"""Channels on which boards say how they stand, and are told what to take: with models, and with agents."""
LOOK_S = 0.5
"""Between two looks at whether somebody gave an order."""
AGAIN_S = 20.0
"""Between two offers to a board that says nothing."""
TOLD_AT_ONCE, TOLD_PER_S = 128.0, 1 / 30
"""Records of how it stands that a board may cause, at once and for ever; a rollout takes some eight of each. What is
beyond them is not lost: the last word of it is recorded as soon as it may be."""
MOST_BOARDS = 1 << 14
PROFILE_S = 10.0
"""For which a board that has not reported yet is offered nothing: canaries are of its profile."""


@dataclass
class RolloutEngine:
    """One rollout under way.

    Attributes:
        transport: Way to the broker.
        clock: Monotonic seconds.
        worker: Reads and writes files.
        state: What the journal came to so far.
        frame_bytes: Of a payload in one message.
        patience_s: Seconds that one board may keep the others waiting.
        stays: Whether to go on for boards that are away, when nothing is left to do for those that are there.
        wait_s: Seconds for which it waits where nobody is there who could take it; then it stops.
        tell: Is told of every record.
        wait: Is told what is waited for, whenever that changes.
        closed_topics: Where to note, for the transport, what is closed now to boards that flood it.
    """

    site: str
    transport: Transport
    clock: Clock
    worker: Worker
    journal: RolloutJournal
    state: RolloutState
    stored: StoredRelease | StoredAgent
    frame_bytes: int
    patience_s: float
    stays: bool = False
    wait_s: float = math.inf
    tell: Callable[[AnyRolloutRecord], None] = lambda _record: None
    wait: Callable[[str], None] = lambda _why: None
    fleet: Fleet = field(default_factory=Fleet)
    models: dict[str, ModelStatus] = field(default_factory=dict)
    prepared: dict[str, str] = field(default_factory=dict)
    parts: PartsOut = field(init=False)
    _pending: list[AnyRolloutRecord] = field(default_factory=list)
    _profiles: dict[str, str] = field(default_factory=dict)
    _heard_at: dict[str, float] = field(default_factory=dict)
    _until: dict[str, str] = field(default_factory=dict)
    _said_at: dict[tuple[str, str], float] = field(default_factory=dict)
    _refused: set[str] = field(default_factory=set)
    closed_topics: set[bytes] = field(default_factory=set)
    _told: RecordLimiter = field(default_factory=lambda: RecordLimiter(TOLD_AT_ONCE, TOLD_PER_S, "a rollout's journal"))
    _untold: set[str] = field(default_factory=set)
    _patience: Patience = field(default_factory=Patience)
    _deserted_since: float | None = None
    _why: str = ""
    _manifest: bytes = field(init=False)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        """Have parts ready for those who lack them."""
        self._manifest = self.stored.content()
        self.parts = PartsOut(
            *(self.site, self.plan.deployment, self.transport, self.clock, self.worker, self.stored),
            frame_bytes=self.frame_bytes,
            patience_s=self.patience_s,
            expected=self._fetching,
            sent=self._note_sent,
            channel=self._channels[1],
        )

    @property
    def _channels(self) -> tuple[str, str]:
        return AGENTS if isinstance(self.stored, StoredAgent) else MODELS

    @property
    def plan(self) -> RolloutPlan:
        """What it is to do."""
        return self.state.plan

    def boards(self) -> dict[str, Board]:
        """Return the boards that serve releases, by name."""
        online = set(self.fleet.online)
        return {
            device: Board(
                self._profiles.get(device, ""),
                device in online,
                status if status.name else None,
                self._until.get(device, ""),
            )
            for device, status in sorted(self.models.items())
        }

    def _fetching(self) -> set[str]:
        """Return the boards that are there and may still ask for parts."""
        boards = self.boards()
        return fetching(self.state, boards) | set(preparing(self.state, boards, self.prepared))

    def _note_sent(self, devices: tuple[str, ...], size: int, sent: int) -> None:
        self._pending.append(PartsSent(at=utc_stamp(), devices=devices, size=size, sent=sent))
        self._wake.set()

    async def run(self) -> None:
        """Drive the rollout until it is over, or until cancelled where it stays for boards that are away.

        Raises:
            CorruptFile: The journal is damaged.
            Unwritable: The disk takes nothing more.
        """
        channels = {channel: CHANNELS[channel] for channel in ("status", "report", "lacks", self._channels[0])}
        admission = Admission(self.clock, self._refuse, window_bytes=0, channels=channels)
        known = self.transport, self.site, admission, lambda: {*self.fleet.statuses, *self.models}, self.closed_topics
        async with Subscriptions(*known).open(), background(self._hear(admission), self.parts.run()):
            await asyncio.sleep(LOOK_S)  # what the broker has retained comes first
            while await self._step():
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._wake.wait()
                self._wake.clear()

    async def _step(self) -> bool:
        """Do what can be done now; tell whether anything is left to do."""
        self._give_up()
        for device in tuple(self._untold):
            self._note_told(device)
        await self._write()
        decision = self._decide()
        while records := self._records_of(decision):
            await self._write(*records)
            decision = self._decide()
        self._note_wait(decision)
        await self._say()
        self._dismiss()
        if self._pending:
            await self._write()
        return self.stays or not isinstance(decision, EndRollout)

    def _give_up(self) -> None:
        """Note the boards that took longer than they may."""
        boards = self.boards()
        limits = time_limits(self.state, boards, self.parts.wanted_bytes)
        for device, cause in self._patience.overdue(limits, self.clock()).items():
            self._pending.append(BoardGivenUp(at=utc_stamp(), device=device, cause=cause))
        offline_limits = {device: limit for device, limit in limits.items() if not boards[device].online}
        self._until = {
            device: self._until.get(device) or self._time_of(device, limit) for device, limit in offline_limits.items()
        }

    def _time_of(self, device: str, limit: TimeLimit) -> str:
        """Return the time of day at which a board that is away will be given up."""
        until = datetime.fromtimestamp(utc_seconds() + self._patience.remaining_s(device, limit), UTC)
        return f"{until:%Y-%m-%dT%H:%M:%SZ}"

    def _decide(self) -> Decision:
        """Decide what to do; where nobody has been there for long, that is to stop."""
        decision, now = decide(self.state, self.boards()), self.clock()
        if isinstance(decision, OpenWave) and (new := self._newcomers(decision.devices, now)):
            return AwaitBoards(f"waiting for the first report of {', '.join(new[:MOST_NAMED])}")
        if not (isinstance(decision, AwaitBoards) and decision.is_deserted):
            self._deserted_since = None
            return decision
        self._deserted_since = now if self._deserted_since is None else self._deserted_since
        if now - self._deserted_since < self.wait_s:
            return decision
        return ChangeCourse("stop", f"nobody came within {self.wait_s:g} s: {decision.why}")

    def _newcomers(self, devices: Mapping[str, str], now: float) -> list[str]:
        """Return the boards that have just come, and of which nobody knows yet what they are."""
        return [device for device, profile in devices.items() if not profile and now - self._heard_at[device] < PROFILE_S]

    def _note_wait(self, decision: Decision) -> None:
        why = decision.why if isinstance(decision, AwaitBoards) else ""
        if why and why != self._why:
            self.wait(why)
        self._why = why

    def _records_of(self, decision: Decision) -> list[AnyRolloutRecord]:
        """Return what a decision puts into the journal; nothing where it says nothing new."""
        now = utc_stamp()
        match decision:
            case OpenWave():
                reports = [(device, self.models[device]) for device in decision.devices]
                records = [BoardTold(at=now, device=device, status=status) for device, status in reports if status.name]
                return [*records, WaveOpened(at=now, devices=decision.devices, canary=decision.canary)]
            case ChangeCourse():
                return [RolloutOrdered(at=now, order=decision.order, cause=decision.cause)]
            case EndRollout() if (self.state.outcome, self.state.behind) != (decision.outcome, decision.behind):
                return [RolloutEnded(at=now, outcome=decision.outcome, behind=decision.behind)]
        return []

    async def _write(self, *records: AnyRolloutRecord) -> None:
        """Append records, and take in what others have ordered."""
        is_first = True
        while is_first or self._pending:  # what boards say meanwhile counts before anything is decided
            written = [*self._pending, *(records if is_first else ())]
            self._pending, is_first = [], False
            call = self.worker(self.journal.append, *written) if written else self.worker(self.journal.news)
            for record in await call:
                self.state.apply(record)
                self.tell(record)

    async def _say(self) -> None:
        """Tell boards what they are to hear and may not have heard yet."""
        for device, message in due_words(self.state, self.boards(), self._manifest, self._is_news, self.prepared):
            await self._publish(device, message)

    def _is_news(self, device: str) -> bool:
        """Tell whether a board, or this process, has started since the offer was made: it may have forgotten that."""
        return (device, Offer.__name__) not in self._said_at

    async def _publish(self, device: str, message: Message) -> None:
        """Say something to a board, not often."""
        now = self.clock()
        message_key = device, type(message).__name__
        if now - self._said_at.get(message_key, -AGAIN_S) < AGAIN_S:
            return
        try:
            await self.transport.publish(topic(self.site, device, self._channels[1]), wire.encode(message))
            self._said_at[message_key] = now
        except Unreachable as error:
            log.debug("said again later: %s", error)

    def _dismiss(self) -> None:
        """Send no more parts to boards that have them, or are gone."""
        recipients = self._fetching() if self.state.mode in ("going", "paused") else set()
        for device in self.models.keys() - recipients:
            self.parts.forget(device)

    async def _hear(self, admission: Admission) -> None:
        async for delivery in admission:
            try:
                self._take(delivery)
            except WireError as error:
                device = parse_device(delivery[0])
                self._refuse(device, error)
                admission.penalize(device)
                admission.count_useless(device, parse_channel(delivery[0]), len(delivery[1]))

    def _refuse(self, device: str, error: WireError) -> None:
        """Say once of each board that something of it was refused."""
        if device not in self._refused:
            log.warning("refused a message of %s (%s): %s", device, error.reason, error)
        self._refused.add(device)

    def _take(self, delivery: Delivery) -> None:
        device, data = parse_device(delivery[0]), delivery[1]
        if not data:
            return
        message = clip(wire.decode(data))
        if isinstance(message, Want):
            self.parts.want(device, message)
            return
        if not isinstance(message, Status | Report | Releases | Lacks):
            raise WireError(f"{type(message).__name__} is not for a rollout", reason="unexpected")
        if message.device != device:
            raise WireError(f"{type(message).__name__} in the name of {message.device[:64]!r}", reason="identity")
        self._take_message(message)
        self._wake.set()

    def _take_message(self, message: Status | Report | Releases | Lacks) -> None:
        device = message.device
        match message:
            case Status():
                before = self.fleet.statuses.get(device)
                self.fleet.observe(message)
                if message.online and (before is None or before.session != message.session):
                    for kind in (Offer, Ahead, Withdraw):
                        self._said_at.pop((device, kind.__name__), None)  # it may have been away when it was told
            case Report():
                self._profiles[device] = message.board  # which a process before the one that runs knew as well
                self.fleet.observe(message)
            case Releases():
                self._take_releases(message)
            case Lacks() if message.deployment == self.plan.deployment and device in self._fetching():
                self.parts.ask(device, parse_lacks(message))

    def _take_releases(self, message: Releases) -> None:
        device = message.device
        if device not in self.models and len(self.models) >= MOST_BOARDS:
            raise WireError(f"{device} is one name too many", reason="too-many-devices")
        status = next((model for model in message.models if model.name == self.plan.name), ModelStatus(name=""))
        before = self.models.get(device)
        self._heard_at.setdefault(device, self.clock())
        self.models[device], self.prepared[device] = status, message.ahead
        if status.name and (before is None or _facts(before) != _facts(status)):
            self._note_told(device)

    def _note_told(self, device: str) -> None:
        """Record how a board stands where that is news; later, where it says too much."""
        self._untold.discard(device)
        recorded, status = self.state.statuses.get(device), self.models[device]
        if not status.name or device not in self.state.offered_boards or (recorded and _facts(recorded) == _facts(status)):
            return
        if self._told.take(device, self.clock()):
            self._pending.append(BoardTold(at=utc_stamp(), device=device, status=status))
        else:
            self._untold.add(device)


def _facts(status: ModelStatus) -> tuple[object, ...]:
    """Return what of a status is news when it changes."""
    return (
        *(status.name, status.committed, status.previous, status.candidate),
        *(status.state, status.deployment, status.attempt, status.reason),
    )
