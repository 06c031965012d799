"""Route device messages to the open rounds."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from edge_server.fleet.admission import FRAMED, MOST_BYTES, Admission
from edge_server.fleet.answers import Answers, build_ack, build_skip
from edge_server.fleet.handlers import Broadcast, Collector, StepServer
from edge_server.fleet.state import Fleet
from edge_server.fleet.subscriptions import Subscriptions
from shared.errors import Unreachable, WireError
from shared.protocol import wire
from shared.protocol.clip import clip
from shared.protocol.messages import Features, Message, Report, Status, Task, Update, Want
from shared.protocol.topics import ANY, is_name, parse_channel, parse_device, topic
from shared.runtime.clock import Clock
from shared.runtime.executor import Worker, background
from shared.runtime.phases import log_phase
from shared.transfer import frames
from shared.transfer.pace import Pace
from shared.transport.base import Delivery, Transport
from shared.transport.packet_limit import MOST_RECEIVED_BYTES

log = logging.getLogger(__name__)

CONNECT_S = 3.0
"""Seconds of waiting for the broker that are not worth a log message."""
GIVE_AGAIN_S, GIVE_LAST_S = 0.1, 30.0
"""Seconds between tries to send a task, at first and at most."""
MOST_QUERIES, ASK_S, ASK_AGAIN_S = 16, 5.0, 10.0
"""Concurrent status queries, seconds until one times out, and seconds until it is repeated."""


@dataclass(frozen=True)
class OpenRound:
    """Round that is open for some devices.

    Attributes:
        tasks: Its tasks, by device.
        splitting: Serves its steps; None unless it is split.
        payloads: Payloads for each device.
    """

    gather: Collector
    tasks: Mapping[str, Task]
    splitting: StepServer | None
    payloads: Mapping[str, Sequence[Broadcast]]

    def owes(self, device: str) -> bool:
        """Return true if a device has a task of this round that is not done."""
        return device in self.tasks and device not in self.gather.accepted and device not in self.gather.failed

    def dismiss(self, device: str) -> None:
        """Stop serving payloads to a device that has them or disconnected."""
        for payload in self.payloads.get(device, ()):
            payload.dismiss(device)

    async def handle_reconnect(self, device: str) -> None:
        """Handle a new session of a device."""
        await self.gather.handle_reconnect(device)
        if self.splitting:
            await self.splitting.handle_reconnect(device)


@dataclass
class Server:
    """Message hub of one site. Holds no learning state.

    Several runs may have a round open at once, each with other devices.

    Attributes:
        fleet: Last known state of the devices.
        refused: Counts of messages dropped before they reached a round, by reason, since the last `take_refused`.
        changed: Set whenever the fleet changes.
        runs: Names of the current runs.
        broker: Set while the broker is connected; None where it cannot disconnect.
        was_run: Returns true for names of this site's earlier runs, so that their late updates can be settled.
        report_listeners, status_listeners: Called with every new report, and every birth or death; they must not block.
        paces: Pace of each device's split-session features.
        ceilings: Largest frame in bytes that passes, for devices whose larger frames were lost.
        takes: Returns true for devices that may take part.
        window_bytes: Most bytes of frames that are requested from a device at once; bounds its queue. None in replay.
        denied: Revoked devices, whose messages are ignored.
        closed_topics: Topics closed to flooding devices; the transport reads them.
        longest_bytes: Length of the largest accepted packet.
    """

    site: str
    transport: Transport
    clock: Clock
    worker: Worker
    was_run: Callable[[str], bool] = lambda _run: False
    runs: set[str] = field(default_factory=set)
    broker: asyncio.Event | None = None
    fleet: Fleet = field(default_factory=Fleet)
    refused: Counter[str] = field(default_factory=Counter)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    report_listeners: list[Callable[[Report], None]] = field(default_factory=list)
    status_listeners: list[Callable[[Status], None]] = field(default_factory=list)
    paces: dict[str, Pace] = field(default_factory=dict)
    ceilings: dict[str, int] = field(default_factory=dict)
    takes: Callable[[str], bool] = lambda _device: True
    window_bytes: int | None = None
    denied: frozenset[str] = frozenset()
    closed_topics: set[bytes] = field(default_factory=set)
    longest_bytes: int = MOST_RECEIVED_BYTES
    answers: Answers = field(init=False)
    _open_rounds: dict[str, OpenRound] = field(default_factory=dict)
    _used_twice: set[str] = field(default_factory=set)
    _sending: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _queries: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _asked_at: dict[str, float] = field(default_factory=dict)
    _admission: Admission | None = None

    def __post_init__(self) -> None:
        self.answers = Answers(self.site, self.transport, self.clock)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Receive device messages during the block."""
        async with self._subscribe() as source:
            try:
                async with background(self._dispatch(source)):
                    yield
            finally:
                await self._close()

    @asynccontextmanager
    async def _subscribe(self) -> AsyncIterator[AsyncIterable[Delivery]]:
        """Subscribe to the devices' channels, with admission control unless in replay."""
        if self.window_bytes is None:
            async with self.transport.subscribe(*(topic(self.site, ANY, channel) for channel in MOST_BYTES)) as inbox:
                yield inbox
            return
        self._admission = admission = Admission(
            self.clock, self._refuse, window_bytes=self.window_bytes, takes=self.takes
        )
        subscriptions = Subscriptions(
            self.transport, self.site, admission, lambda: self.fleet.statuses, self.closed_topics
        )
        async with subscriptions.open():
            yield admission

    async def _close(self) -> None:
        """Cancel tasks and queries in flight."""
        pending = [*self._sending.values(), *self._queries.values()]
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        await self.answers.close()

    @asynccontextmanager
    async def round(
        self,
        gather: Collector,
        tasks: dict[str, Task],
        outgoing: Sequence[Broadcast],
        splitting: StepServer | None = None,
    ) -> AsyncIterator[None]:
        """Keep a round open: send its payloads and tasks, serve its steps if it is split, collect its updates.

        Args:
            outgoing: Payloads, each with its audience.
            splitting: Serves the steps of a split round; None for any other.
        """
        payloads = defaultdict[str, list[Broadcast]](list)
        for payload in outgoing:
            for device in payload.devices:
                payloads[device].append(payload)
        self._open_rounds[gather.run] = OpenRound(gather, tasks, splitting, payloads)
        serving = [splitting.serve(self.reachable)] if splitting else []
        try:
            async with background(*(payload.run() for payload in outgoing), gather.watch(), *serving):
                for device in tasks:
                    if not await self._send_task(device):
                        self._schedule_task(device)
                yield
        finally:
            del self._open_rounds[gather.run]

    @property
    def tasks(self) -> dict[str, Task]:
        """Tasks of the open rounds, by device."""
        return {device: task for open_round in self._open_rounds.values() for device, task in open_round.tasks.items()}

    def _find_round(self, device: str) -> OpenRound | None:
        """Return the open round that may expect messages of a device: the only one, or the one with a task for it."""
        rounds = self._open_rounds.values()
        return next((entry for entry in rounds if len(rounds) == 1 or device in entry.tasks), None)

    def _find_taker(self, device: str, channel: str) -> Collector | StepServer | None:
        """Return the receiver of a device's frames on a channel; None if no round expects any."""
        open_round = self._find_round(device)
        if open_round is None:
            return None
        return open_round.gather if channel == "update" else open_round.splitting

    def admits(self, name: str, size: int) -> bool:
        """Return true if a payload of `size` bytes may be received; longer ones must be expected frames.

        Args:
            size: Approximate length in bytes.
        """
        device, channel = parse_device(name), parse_channel(name)
        if self._admission is None or size <= MOST_BYTES.get(channel, 0):
            return True
        taker = self._find_taker(device, channel)
        is_awaited = size <= self.longest_bytes and taker is not None and taker.awaits(device)
        is_awaited = is_awaited and self._admission.has_room(device, channel, size)
        if not is_awaited:
            self._admission.count_useless(device, channel, size)
        return is_awaited

    def review_strangers(self) -> None:
        """Receive all messages of devices that have become participants of a run."""
        if self._admission:
            self._admission.review_strangers()

    @property
    def waiting_bytes(self) -> int:
        """Bytes received but not read yet; 0 without admission control."""
        return self._admission.waiting_bytes if self._admission else 0

    async def reachable(self) -> bool:
        """Wait for the broker; return true if it was connected already."""
        if self.broker is None or self.broker.is_set():
            return True
        with suppress(TimeoutError):
            async with asyncio.timeout(CONNECT_S):
                await self.broker.wait()
                return False
        log.warning("waiting for the broker; no deadline runs meanwhile")
        await self.broker.wait()
        return False

    def take_refused(self) -> Counter[str]:
        """Return and reset the counts of refused messages."""
        refused, self.refused = self.refused, Counter()
        return refused

    async def _send_task(self, device: str) -> bool:
        """Send a device its task unless it is done; return false if the broker is unreachable."""
        open_round = self._find_round(device)
        if not open_round or not open_round.owes(device):
            return True
        try:
            await self.transport.publish(topic(self.site, device, "task"), wire.encode(open_round.tasks[device]))
        except Unreachable as error:
            log.debug("task waits for the broker: %s", error)
            return False
        return True

    async def _send_task_reliably(self, device: str) -> None:
        """Send a device its task, repeatedly until the broker accepts it.

        Device messages can arrive a moment before a new connection is usable, and may open a round.
        """
        pause_s = GIVE_AGAIN_S  # a lost connection may not be detected yet, or the broker denies it
        while not await self._send_task(device) and self.broker:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, GIVE_LAST_S)
            await self.broker.wait()

    def _schedule_task(self, device: str) -> None:
        """Send a device its task in the background, once at a time."""
        open_round = self._find_round(device)
        if open_round and device in open_round.tasks and device not in self._sending:
            self._sending[device] = sending = asyncio.create_task(self._send_task_reliably(device), name="give")
            sending.add_done_callback(lambda _: self._sending.pop(device, None))

    async def _dispatch(self, source: AsyncIterable[Delivery]) -> None:
        async for name, data in source:
            device, channel, is_of_use = parse_device(name), parse_channel(name), True
            try:
                if not is_name(device) or device in self.denied:
                    continue  # own topics; messages of revoked devices still in flight
                if channel in FRAMED and frames.is_frame(data):
                    taker = self._find_taker(device, channel)
                    is_of_use = taker is not None and await taker.frame(device, data)
                    self.fleet.life_signs[device] += taker is not None
                elif data:
                    await self._take(device, wire.decode(data))
            except WireError as error:
                self._refuse(device, error)
                is_of_use = False
                if self._admission:
                    self._admission.penalize(device)
            if self._admission and not is_of_use:
                self._admission.count_useless(device, channel, len(data))

    async def _take(self, device: str, message: Message) -> None:
        message = clip(message)
        if isinstance(message, Status | Report) and message.device != device:
            raise WireError(f"{type(message).__name__} in the name of {message.device[:64]!r}", reason="identity")
        if isinstance(message, Status):
            await self.observe(device, message)
        elif isinstance(message, Report):
            self._handle_report(message)
            await self._check_presence(device, is_proof=self.fleet.has_fresh_reports(device))
        else:
            self.fleet.life_signs[device] += 1
            await self._check_presence(device, is_proof=True)
            await self._route(device, message)

    async def _route(self, device: str, message: Message) -> None:
        match message:
            case Want():
                self._handle_want(device, message)
            case Features():
                await self._handle_features(device, message)
            case Update():
                await self._handle_update(device, message)
            case other:
                raise WireError(f"{type(other).__name__} is not for the server", reason="unexpected")

    def _handle_want(self, device: str, want: Want) -> None:
        if not (open_round := self._find_round(device)):
            return
        if payloads := [payload for payload in open_round.payloads.get(device, ()) if payload.digest == want.digest]:
            payloads[0].want(device, want)
        elif open_round.splitting:
            open_round.splitting.want(device, want)

    def _handle_report(self, report: Report) -> None:
        if self.fleet.observe(report):
            for listener in self.report_listeners:
                listener(report)

    async def _check_presence(self, device: str, *, is_proof: bool) -> None:
        """Treat a message as a sign of life: a false death or a lost birth is corrected.

        Args:
            is_proof: Whether the message was certainly sent now, and is not a retained one.
        """
        status = self.fleet.statuses.get(device)
        if status and status.online:
            return
        if is_proof and status and (alive := self.fleet.mark_online(device)):
            log.info("device %s sends messages although its status is offline", device)
            await self._publish_change(alive, status)
        else:
            self._query_status(device)

    def _query_status(self, device: str) -> None:
        """Fetch a device's retained status from the broker, at a limited rate."""
        now = self.clock()
        asked_at = self._asked_at.get(device, -ASK_AGAIN_S)
        if now - asked_at < ASK_AGAIN_S or len(self._queries) >= MOST_QUERIES or not self.takes(device):
            return
        self._asked_at = {name: at for name, at in self._asked_at.items() if now - at < ASK_AGAIN_S} | {device: now}
        self._queries[device] = query = asyncio.create_task(self._fetch_status(device), name="ask")
        query.add_done_callback(lambda _: self._queries.pop(device, None))

    async def _fetch_status(self, device: str) -> None:
        async with self.transport.subscribe(topic(self.site, device, "status")) as inbox:
            with suppress(TimeoutError, WireError):
                async with asyncio.timeout(ASK_S):
                    _, data = await anext(inbox)
                if device not in self.fleet.online:
                    await self._take(device, wire.decode_as(Status, data))

    async def observe(self, device: str, message: Status) -> None:
        """Handle a device's birth or death."""
        if self.fleet.is_duplicate_id(message):
            self._report_duplicate_id(device)
        before = self.fleet.statuses.get(device)
        if self.fleet.observe(message):
            await self._publish_change(message, before)

    async def _publish_change(self, after: Status, before: Status | None) -> None:
        """Notify listeners that a device is online or offline."""
        device = after.device
        self.changed.set()
        for listener in self.status_listeners:
            listener(after)
        if after.online:
            is_same = before and (before.instance, before.session) == (after.instance, after.session)
            if before is None or not (is_same and before.online):  # brokers may deliver a birth twice
                log.info("device %s is here, session %d", device, after.session)
            if before and not is_same and (open_round := self._find_round(device)):
                await open_round.handle_reconnect(device)
            self._schedule_task(device)
        elif before and before.online:
            log.info("device %s is gone", device)
            if open_round := self._find_round(device):
                open_round.dismiss(device)
                open_round.gather.handle_disconnect(device)

    async def _handle_update(self, device: str, update: Update) -> None:
        """Pass an offer to the open round, or settle it if no round will take it."""
        open_round = self._open_rounds.get(update.run)
        if open_round is None and self._is_between_rounds(update.run):
            return  # between rounds the device simply offers again
        is_open = open_round is not None and update.round == open_round.gather.number
        if open_round and is_open and device in open_round.gather.expected:
            gather, splitting = open_round.gather, open_round.splitting
            if update.start in (b"", gather.starts[device]):
                open_round.dismiss(device)  # a device that offers has the whole payload
            if splitting and splitting.is_void(device, update):
                self.answers.tell(device, "ack", build_ack(update, "void"))
            else:
                await gather.offer(device, update)
            if splitting:
                splitting.wake()
        elif not is_open and is_name(update.run) and self.was_run(update.run):
            self.answers.tell(device, "ack", build_ack(update, "late"))
            log_phase(log, "late", run=update.run, round=update.round, device=device)
        else:
            reason = "unknown-device" if is_open else "unknown-run"
            error = WireError("update of no run, round and device of this site", reason=reason)
            self.answers.tell(device, "ack", build_ack(update, "refused", str(error)))
            raise error

    async def _handle_features(self, device: str, features: Features) -> None:
        """Pass features to the open round; if their round is over, tell the device so that it ends its session."""
        open_round = self._open_rounds.get(features.run)
        if open_round is None and self._is_between_rounds(features.run):
            return  # the device offers again
        is_open = open_round is not None and features.round == open_round.gather.number
        if open_round and open_round.splitting and is_open:
            if features.start == open_round.gather.starts.get(device):
                open_round.dismiss(device)
            await open_round.splitting.offer(device, features)
        elif not is_open and is_name(features.run) and self.was_run(features.run):
            self.answers.tell(device, "gradient", build_skip(features))
        else:
            raise WireError("features of no run, round and device of this site", reason="unknown-run")

    def _is_between_rounds(self, run: str) -> bool:
        """Return true if a run without an open round may open another; before any run is known, each may."""
        return not self.runs or run in self.runs

    def _report_duplicate_id(self, device: str) -> None:
        """Log once that an id is used twice, and count each takeover."""
        if device not in self._used_twice:
            log.warning(
                "two agents run as device %s and disconnect each other from the broker; give each board its own name",
                device,
            )
        self._used_twice.add(device)
        self.refused["id-in-use"] += 1

    def _refuse(self, device: str, error: WireError) -> None:
        """Count a refused message; log it once per reason and round."""
        if not self.refused[error.reason]:
            log.warning("refused a message of %s (%s): %s", device, error.reason, error)
        self.refused[error.reason] += 1
