"""Rollout engine: observe boards, decide, journal the decision, then send offers.

It may be killed at any moment and resumes from its journal: nothing is sent to a board before it is journalled, and no
message needs to arrive. An offer is repeated when a board connects, and periodically until the board answers.
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
from edge_server.release.rollout.bundle_distributor import BundleDistributor
from edge_server.release.rollout.due_messages import boards_fetching, boards_prefetching, due_messages
from edge_server.release.rollout.step_limits import StepTimer, TimeLimit, step_limits
from edge_server.release.rollout.waves import (
    MAX_NAMED,
    AwaitBoards,
    Board,
    Decision,
    EndRollout,
    IssueOrder,
    OpenWave,
    decide,
)
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
"""Channels from boards, with the size limit of a message in bytes."""
MODELS, AGENTS = ("release", "offer"), ("agent", "upgrade")
"""Status channel and offer channel, for models and for agent versions."""
POLL_S = 0.5
"""Interval between reads of the journal for orders from other processes."""
RESEND_S = 20.0
"""Least interval between two equal messages to a board."""
STATUS_BURST, STATUS_RECORDS_PER_S = 128.0, 1 / 30
"""Rate limit of status records by board; a rollout needs about eight for each. Beyond the limit, only the latest status
is recorded, as soon as the limit permits."""
MAX_BOARDS = 1 << 14
PROFILE_WAIT_S = 10.0
"""Wait for the first report of a new board: canaries are selected by the profile in it."""


@dataclass
class RolloutEngine:
    """A running rollout.

    Attributes:
        clock: Clock in monotonic seconds.
        worker: Runs blocking file access.
        state: State folded from the journal.
        frame_bytes: Payload bytes in one frame.
        patience_s: Seconds that one board may delay the others that receive the same bundle.
        stays: Whether to keep running for offline boards when nothing is left to do for those online.
        wait_s: Seconds to wait while all boards that could take the release are offline, before the rollout stops.
        on_record: Called with each appended record.
        on_wait: Called with the reason for waiting whenever it changes.
        models: Last status of each board for this release's model; its name is empty without one.
        prepared: Deployment whose parts each board has prefetched completely.
        closed_topics: Topics closed to flooding boards, shared with the transport.
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
    on_record: Callable[[AnyRolloutRecord], None] = lambda _record: None
    on_wait: Callable[[str], None] = lambda _why: None
    fleet: Fleet = field(default_factory=Fleet)
    models: dict[str, ModelStatus] = field(default_factory=dict)
    prepared: dict[str, str] = field(default_factory=dict)
    parts: BundleDistributor = field(init=False)
    _pending: list[AnyRolloutRecord] = field(default_factory=list)
    _profiles: dict[str, str] = field(default_factory=dict)
    _first_seen_at: dict[str, float] = field(default_factory=dict)
    _give_up_at: dict[str, str] = field(default_factory=dict)
    _sent_at: dict[tuple[str, str], float] = field(default_factory=dict)
    _refused: set[str] = field(default_factory=set)
    closed_topics: set[bytes] = field(default_factory=set)
    _limiter: RecordLimiter = field(init=False)
    _unrecorded: set[str] = field(default_factory=set)
    _timer: StepTimer = field(default_factory=StepTimer)
    _all_offline_since: float | None = None
    _wait_reason: str = ""
    _manifest: bytes = field(init=False)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        """Create the status limiter and the distributor of parts."""
        self._limiter = RecordLimiter(STATUS_BURST, STATUS_RECORDS_PER_S, "a rollout's journal")
        self._manifest = self.stored.content()
        self.parts = BundleDistributor(
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
        """Plan of the rollout."""
        return self.state.plan

    def boards(self) -> dict[str, Board]:
        """Return the boards that serve releases, by device name."""
        online = set(self.fleet.online)
        return {
            device: Board(
                self._profiles.get(device, ""),
                device in online,
                status if status.name else None,
                self._give_up_at.get(device, ""),
            )
            for device, status in sorted(self.models.items())
        }

    def _fetching(self) -> set[str]:
        """Return the online boards that may still request parts."""
        boards = self.boards()
        return boards_fetching(self.state, boards) | set(boards_prefetching(self.state, boards, self.prepared))

    def _note_sent(self, devices: tuple[str, ...], size: int, sent: int) -> None:
        self._pending.append(PartsSent(at=utc_stamp(), devices=devices, size=size, sent=sent))
        self._wake.set()

    async def run(self) -> None:
        """Run the rollout until it is over, or until cancelled if `stays`.

        Raises:
            CorruptFile: The journal is damaged.
            Unwritable: The disk is full.
        """
        channels = {channel: CHANNELS[channel] for channel in ("status", "report", "lacks", self._channels[0])}
        admission = Admission(self.clock, self._refuse, window_bytes=0, channels=channels)
        subscriptions = Subscriptions(
            self.transport, self.site, admission, lambda: {*self.fleet.statuses, *self.models}, self.closed_topics
        )
        async with subscriptions.open(), background(self._receive(admission), self.parts.run()):
            await asyncio.sleep(POLL_S)  # receive the retained messages before the first decision
            while await self._step():
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await self._wake.wait()
                self._wake.clear()

    async def _step(self) -> bool:
        """Journal and send everything due; return whether to continue."""
        self._give_up()
        for device in tuple(self._unrecorded):
            self._record_status(device)
        await self._write()
        decision = self._decide()
        while records := self._records_of(decision):
            await self._write(*records)
            decision = self._decide()
        self._note_wait(decision)
        await self._send_due()
        self._forget_served()
        if self._pending:
            await self._write()
        return self.stays or not isinstance(decision, EndRollout)

    def _give_up(self) -> None:
        """Give up boards that exceeded the time limit of a step."""
        boards = self.boards()
        limits = step_limits(self.state, boards, self.parts.wanted_bytes)
        for device, cause in self._timer.overdue(limits, self.clock()).items():
            self._pending.append(BoardGivenUp(at=utc_stamp(), device=device, cause=cause))
        offline_limits = {device: limit for device, limit in limits.items() if not boards[device].online}
        self._give_up_at = {
            device: self._give_up_at.get(device) or self._time_of(device, limit)
            for device, limit in offline_limits.items()
        }

    def _time_of(self, device: str, limit: TimeLimit) -> str:
        """Return the UTC time at which an offline board will be given up."""
        until = datetime.fromtimestamp(utc_seconds() + self._timer.remaining_s(device, limit), UTC)
        return f"{until:%Y-%m-%dT%H:%M:%SZ}"

    def _decide(self) -> Decision:
        """Decide the next action; stop once all boards have been offline for `wait_s`."""
        decision, now = decide(self.state, self.boards()), self.clock()
        if isinstance(decision, OpenWave) and (new := self._newcomers(decision.devices, now)):
            return AwaitBoards(f"waiting for the first report of {', '.join(new[:MAX_NAMED])}")
        if not (isinstance(decision, AwaitBoards) and decision.no_board_online):
            self._all_offline_since = None
            return decision
        self._all_offline_since = now if self._all_offline_since is None else self._all_offline_since
        if now - self._all_offline_since < self.wait_s:
            return decision
        return IssueOrder("stop", f"no board connected within {self.wait_s:g} s: {decision.why}")

    def _newcomers(self, devices: Mapping[str, str], now: float) -> list[str]:
        """Return the boards that have just connected and whose profile is unknown."""
        new = (device for device, profile in devices.items() if not profile)
        return [device for device in new if now - self._first_seen_at[device] < PROFILE_WAIT_S]

    def _note_wait(self, decision: Decision) -> None:
        why = decision.why if isinstance(decision, AwaitBoards) else ""
        if why and why != self._wait_reason:
            self.on_wait(why)
        self._wait_reason = why

    def _records_of(self, decision: Decision) -> list[AnyRolloutRecord]:
        """Return the journal records of a decision; empty if it changes nothing."""
        now = utc_stamp()
        match decision:
            case OpenWave():
                reports = [(device, self.models[device]) for device in decision.devices]
                records = [BoardTold(at=now, device=device, status=status) for device, status in reports if status.name]
                return [*records, WaveOpened(at=now, devices=decision.devices, canary=decision.canary)]
            case IssueOrder():
                return [RolloutOrdered(at=now, order=decision.order, cause=decision.cause)]
            case EndRollout() if (self.state.outcome, self.state.behind) != (decision.outcome, decision.behind):
                return [RolloutEnded(at=now, outcome=decision.outcome, behind=decision.behind)]
        return []

    async def _write(self, *records: AnyRolloutRecord) -> None:
        """Append records, and apply orders that other processes appended."""
        is_first = True
        while is_first or self._pending:  # records that arrive during the write must precede the next decision
            written = [*self._pending, *(records if is_first else ())]
            self._pending, is_first = [], False
            call = self.worker(self.journal.append, *written) if written else self.worker(self.journal.news)
            for record in await call:
                self.state.apply(record)
                self.on_record(record)

    async def _send_due(self) -> None:
        """Send the messages that are due and may not have arrived."""
        messages = due_messages(self.state, self.boards(), self._manifest, self._forgot_offer, self.prepared)
        for device, message in messages:
            await self._publish(device, message)

    def _forgot_offer(self, device: str) -> bool:
        """Check whether the board or this process has restarted since the offer was sent."""
        return (device, Offer.__name__) not in self._sent_at

    async def _publish(self, device: str, message: Message) -> None:
        """Publish a message to a board, at most every `RESEND_S`."""
        now = self.clock()
        message_key = device, type(message).__name__
        if now - self._sent_at.get(message_key, -RESEND_S) < RESEND_S:
            return
        try:
            await self.transport.publish(topic(self.site, device, self._channels[1]), wire.encode(message))
            self._sent_at[message_key] = now
        except Unreachable as error:
            log.debug("%s to %s not sent, will be retried: %s", message_key[1], device, error)

    def _forget_served(self) -> None:
        """Stop sending parts to boards that need none or are offline."""
        recipients = self._fetching() if self.state.mode in ("going", "paused") else set()
        for device in self.models.keys() - recipients:
            self.parts.forget(device)

    async def _receive(self, admission: Admission) -> None:
        async for delivery in admission:
            try:
                self._take(delivery)
            except WireError as error:
                device = parse_device(delivery[0])
                self._refuse(device, error)
                admission.penalize(device)
                admission.count_useless(device, parse_channel(delivery[0]), len(delivery[1]))

    def _refuse(self, device: str, error: WireError) -> None:
        """Log the first refused message of each board."""
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
            raise WireError(f"a rollout accepts no {type(message).__name__}", reason="unexpected")
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
                        self._sent_at.pop((device, kind.__name__), None)  # the board may have missed it while offline
            case Report():
                self._profiles[device] = message.board
                self.fleet.observe(message)
            case Releases():
                self._take_releases(message)
            case Lacks() if message.deployment == self.plan.deployment and device in self._fetching():
                self.parts.ask(device, parse_lacks(message))

    def _take_releases(self, message: Releases) -> None:
        device = message.device
        if device not in self.models and len(self.models) >= MAX_BOARDS:
            raise WireError(f"{device}: more than {MAX_BOARDS} boards", reason="too-many-devices")
        status = next((model for model in message.models if model.name == self.plan.name), ModelStatus(name=""))
        before = self.models.get(device)
        self._first_seen_at.setdefault(device, self.clock())
        self.models[device], self.prepared[device] = status, message.ahead
        if status.name and (before is None or _reported_state(before) != _reported_state(status)):
            self._record_status(device)

    def _record_status(self, device: str) -> None:
        """Record a board's status if it changed; postpone the record above the rate limit."""
        self._unrecorded.discard(device)
        recorded, status = self.state.statuses.get(device), self.models[device]
        if not status.name or device not in self.state.offered_boards:
            return
        if recorded and _reported_state(recorded) == _reported_state(status):
            return
        if self._limiter.take(device, self.clock()):
            self._pending.append(BoardTold(at=utc_stamp(), device=device, status=status))
        else:
            self._unrecorded.add(device)


def _reported_state(status: ModelStatus) -> tuple[object, ...]:
    """Return the fields of a status whose changes are recorded."""
    return (
        *(status.name, status.committed, status.previous, status.candidate),
        *(status.state, status.deployment, status.attempt, status.reason),
    )
