"""The server's place on the network: hears every device, hands each message to whom it concerns."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from edge_server.fleet.admission import FRAMED, MOST_BYTES, Admission, Subscriptions
from edge_server.fleet.answers import Answers, ack, skip
from edge_server.fleet.handlers import Broadcast, Collector, StepServer
from edge_server.fleet.state import Fleet
from shared.errors import Unreachable, WireError
from shared.protocol import wire
from shared.protocol.clip import clip
from shared.protocol.messages import Features, Message, Report, Status, Task, Update, Want
from shared.protocol.topics import ANY, is_name, parse_channel, parse_device, topic
from shared.runtime.clock import Clock
from shared.runtime.executor import Worker, background
from shared.transfer import frames
from shared.transfer.pace import Pace
from shared.transport.base import Delivery, Transport
from shared.transport.packet_limit import MOST_RECEIVED_BYTES

log = logging.getLogger(__name__)

CONNECT_S = 3.0
"""Seconds that a broker takes to accept us, and nobody needs to hear of."""
GIVE_AGAIN_S, GIVE_LAST_S = 0.1, 30.0
"""Seconds between tries to give a task, at first and at most."""
ASKING, ASK_S, ASK_AGAIN_S = 16, 5.0, 10.0
"""Devices that the broker is asked for at once, seconds that its answer is waited for, and until one is asked anew."""


@dataclass
class Server:
    """One site. Holds no learning state.

    Attributes:
        fleet: The devices as they last told of themselves.
        refused: What was dropped before it reached a round, counted by reason since the last `take_refused`.
        changed: Set whenever the fleet changes.
        run: The run under way.
        broker: Set while the broker is there; None where it cannot go away.
        was_run: Tells whether a run of that name was ever ours, so that its late updates can be settled.
        keep, seen: Who else is told of every new report, and of every birth and death; none of them may wait.
        paces: How fast features of split sessions come from each device.
        ceilings: Bytes of the largest frames of updates that pass, of devices whose larger ones did not come.
        takes: Whether a device may take part.
        window_bytes: Most bytes of frames that one is asked for at once, which bounds what each says; None in replay.
        denied: Devices of which nothing is heard: they were revoked.
        tasks: Those of the open round, by device.
        closed_topics: Where to note, for the transport, what is closed now to devices that flood it.
        longest_bytes: Of a packet; a longer one is never awaited.
    """

    site: str
    transport: Transport
    clock: Clock
    worker: Worker
    was_run: Callable[[str], bool] = lambda _run: False
    run: str = ""
    broker: asyncio.Event | None = None
    fleet: Fleet = field(default_factory=Fleet)
    refused: Counter[str] = field(default_factory=Counter)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    keep: list[Callable[[Report], None]] = field(default_factory=list)
    seen: list[Callable[[Status], None]] = field(default_factory=list)
    paces: dict[str, Pace] = field(default_factory=dict)
    ceilings: dict[str, int] = field(default_factory=dict)
    takes: Callable[[str], bool] = lambda _device: True
    window_bytes: int | None = None
    denied: frozenset[str] = frozenset()
    closed_topics: set[bytes] = field(default_factory=set)
    longest_bytes: int = MOST_RECEIVED_BYTES
    answers: Answers = field(init=False)
    _gather: Collector | None = None
    _splitting: StepServer | None = None
    tasks: dict[str, Task] = field(default_factory=dict)
    _outgoing: defaultdict[str, list[Broadcast]] = field(default_factory=lambda: defaultdict(list))
    _used_twice: set[str] = field(default_factory=set)
    _giving: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _asking: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _asked_at: dict[str, float] = field(default_factory=dict)
    _admission: Admission | None = None

    def __post_init__(self) -> None:
        """Have somebody say what nobody waits for."""
        self.answers = Answers(self.site, self.transport, self.clock)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Hear devices while the block lasts."""
        async with self._heard() as source:
            try:
                async with background(self._hear(source)):
                    yield
            finally:
                await self._close()

    @asynccontextmanager
    async def _heard(self) -> AsyncIterator[AsyncIterable[Delivery]]:
        """Subscribe to what devices say."""
        if self.window_bytes is None:
            async with self.transport.subscribe(*(topic(self.site, ANY, channel) for channel in MOST_BYTES)) as inbox:
                yield inbox
            return
        self._admission = admission = Admission(
            self.clock, self._refuse, window_bytes=self.window_bytes, takes=self.takes
        )
        known, place = (lambda: self.fleet.statuses), (self.transport, self.site)
        async with Subscriptions(*place, admission, known, self.closed_topics).open():
            yield admission

    async def _close(self) -> None:
        """Give up what is being said and asked."""
        under_way = [*self._giving.values(), *self._asking.values()]
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        await self.answers.close()

    @asynccontextmanager
    async def round(
        self,
        gather: Collector,
        tasks: dict[str, Task],
        outgoing: Sequence[Broadcast],
        splitting: StepServer | None = None,
    ) -> AsyncIterator[None]:
        """Keep a round open: send its payloads, give its tasks, serve its steps if it is split, take its updates.

        Args:
            gather: Takes the round's updates.
            outgoing: Payloads, each with its audience.
            splitting: Serves the steps of a split round; None for any other.
        """
        self._gather, self.tasks, self._splitting = gather, tasks, splitting
        for one in outgoing:
            for device in one.devices:
                self._outgoing[device].append(one)
        serving = [splitting.serve(self.reachable)] if splitting else []
        try:
            async with background(*(one.run() for one in outgoing), gather.watch(), *serving):
                for device in tasks:
                    if not await self._give(device):
                        self._give_soon(device)
                yield
        finally:
            self._gather, self.tasks, self._splitting = None, {}, None
            self._outgoing.clear()

    def admits(self, name: str, size: int) -> bool:
        """Tell whether a payload of so many bytes may come in on a topic: a longer one must be a frame that is awaited.

        Args:
            size: About how many bytes.
        """
        device, channel = parse_device(name), parse_channel(name)
        if self._admission is None or size <= MOST_BYTES.get(channel, 0):
            return True
        taker = self._gather if channel == "update" else self._splitting
        is_awaited = size <= self.longest_bytes and taker is not None and taker.awaits(device)
        is_awaited = is_awaited and self._admission.has_room(device, channel, size)
        if not is_awaited:
            self._admission.waste(device, channel, size)
        return is_awaited

    @property
    def waiting_bytes(self) -> int:
        """Bytes that came and were not read yet, where they are bounded."""
        return self._admission.waiting_bytes if self._admission else 0

    async def reachable(self) -> bool:
        """Wait until the broker is there; tell whether it was there already."""
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
        """Return what was refused since the last call."""
        refused, self.refused = self.refused, Counter()
        return refused

    async def _give(self, device: str) -> bool:
        """Give a device its task, if there still is one; tell whether the broker was there."""
        gather = self._gather
        if not gather or device not in self.tasks or device in gather.accepted or device in gather.failed:
            return True
        try:
            await self.transport.publish(topic(self.site, device, "task"), wire.encode(self.tasks[device]))
        except Unreachable as error:
            log.debug("task waits for the broker: %s", error)
            return False
        return True

    async def _give_until_told(self, device: str) -> None:
        """Give a device its task, again once the broker is back: nothing else may tell of it then.

        What devices say comes a moment before a new connection is in use, and a round may be opened by it.
        """
        pause_s = GIVE_AGAIN_S  # the loss of a connection may not be known yet; or the broker is there and denies it
        while not await self._give(device) and self.broker:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, GIVE_LAST_S)
            await self.broker.wait()

    def _give_soon(self, device: str) -> None:
        """Give a device its task without waiting until it is there; not again while that is under way."""
        if device in self.tasks and device not in self._giving:
            self._giving[device] = giving = asyncio.create_task(self._give_until_told(device), name="give")
            giving.add_done_callback(lambda _: self._giving.pop(device, None))

    async def _hear(self, source: AsyncIterable[Delivery]) -> None:
        async for name, data in source:
            device, channel, is_of_use = parse_device(name), parse_channel(name), True
            try:
                if not is_name(device) or device in self.denied:
                    continue  # the server's own topics; what a broker had passed before it denied that device too
                if channel in FRAMED and frames.is_frame(data):
                    taker = self._gather if channel == "update" else self._splitting
                    is_of_use = taker is not None and await taker.frame(device, data)
                    self.fleet.words[device] += taker is not None
                elif data:
                    await self._take(device, wire.decode(data))
            except WireError as error:
                self._refuse(device, error)
                is_of_use = False
                if self._admission:
                    self._admission.charge(device)
            if self._admission and not is_of_use:
                self._admission.waste(device, channel, len(data))

    async def _take(self, device: str, message: Message) -> None:
        message = clip(message)
        if isinstance(message, Status | Report) and message.device != device:
            raise WireError(f"{type(message).__name__} in the name of {message.device[:64]!r}", reason="identity")
        if isinstance(message, Status):
            await self.observe(device, message)
        elif isinstance(message, Report):
            self._keep(message)
            await self._notice(device, is_proof=self.fleet.reports_prove_life(device))
        else:
            self.fleet.words[device] += 1
            await self._notice(device, is_proof=True)
            await self._hand_over(device, message)

    async def _hand_over(self, device: str, message: Message) -> None:
        match message:
            case Want():
                self._wanted(device, message)
            case Features():
                await self._stepped(device, message)
            case Update():
                await self._offered(device, message)
            case other:
                raise WireError(f"{type(other).__name__} is not for the server", reason="unexpected")

    def _wanted(self, device: str, want: Want) -> None:
        if asked := [one for one in self._outgoing.get(device, ()) if one.digest == want.digest]:
            asked[0].want(device, want)
        elif self._splitting:
            self._splitting.want(device, want)

    def _keep(self, report: Report) -> None:
        if self.fleet.observe(report):
            for keep in self.keep:
                keep(report)

    async def _notice(self, device: str, *, is_proof: bool) -> None:
        """Take what a device says as a sign of life: one whose death was false, or whose birth was lost, is here.

        Args:
            is_proof: Whether it says so now, for certain: nothing that a broker may have retained.
        """
        status = self.fleet.statuses.get(device)
        if status and status.online:
            return
        if is_proof and status and (alive := self.fleet.revive(device)):
            log.info("device %s speaks, although it was said to be gone", device)
            await self._changed(alive, status)
        else:
            self._ask_for(device)

    def _ask_for(self, device: str) -> None:
        """Ask the broker for the status that it has retained of a device; not often."""
        now = self.clock()
        asked_at = self._asked_at.get(device, -ASK_AGAIN_S)
        if now - asked_at < ASK_AGAIN_S or len(self._asking) >= ASKING or not self.takes(device):
            return
        self._asked_at = {one: at for one, at in self._asked_at.items() if now - at < ASK_AGAIN_S} | {device: now}
        self._asking[device] = asking = asyncio.create_task(self._ask(device), name="ask")
        asking.add_done_callback(lambda _: self._asking.pop(device, None))

    async def _ask(self, device: str) -> None:
        async with self.transport.subscribe(topic(self.site, device, "status")) as inbox:
            with suppress(TimeoutError, WireError):
                async with asyncio.timeout(ASK_S):
                    _, data = await anext(inbox)
                if device not in self.fleet.online:
                    await self._take(device, wire.decode_as(Status, data))

    async def observe(self, device: str, message: Status) -> None:
        """Take a device's birth or death, and do what follows from it."""
        if self.fleet.is_used_twice(message):
            self._report_double(device)
        before = self.fleet.statuses.get(device)
        if self.fleet.observe(message):
            await self._changed(message, before)

    async def _changed(self, after: Status, before: Status | None) -> None:
        """Tell everybody that a device is here, or gone."""
        device = after.device
        self.changed.set()
        for see in self.seen:
            see(after)
        if after.online:
            is_same = before and (before.instance, before.session) == (after.instance, after.session)
            if before is None or not (is_same and before.online):  # brokers may tell one birth twice
                log.info("device %s is here, session %d", device, after.session)
            if before and not is_same:
                await self._returned(device)
            self._give_soon(device)
        elif before and before.online:
            log.info("device %s is gone", device)
            self._dismiss(device)
            if self._gather:
                self._gather.gone(device)

    async def _returned(self, device: str) -> None:
        if self._gather:
            await self._gather.returned(device)
        if self._splitting:
            await self._splitting.returned(device)

    async def _offered(self, device: str, update: Update) -> None:
        """Hand an offer to the open round, or settle it where no round will take it any more."""
        gather = self._gather
        if gather is None and self.run in ("", update.run):
            return  # which run and round are next, and what of it is stored, is not known yet: the device offers again
        is_open = gather is not None and (update.run, update.round) == (gather.run, gather.number)
        if gather and is_open and device in gather.expected:
            if update.start in (b"", gather.starts[device]):
                self._dismiss(device)  # who offers an update has fetched everything
            if self._splitting and self._splitting.is_void(device, update):
                self.answers.tell(device, "ack", ack(update, "void"))
            else:
                await gather.offer(device, update)
            if self._splitting:
                self._splitting.wake()
        elif not is_open and is_name(update.run) and self.was_run(update.run):
            self.answers.tell(device, "ack", ack(update, "late"))
            log.debug("phase late run=%s round=%d device=%s", update.run, update.round, device)
        else:
            reason = "unknown-device" if is_open else "unknown-run"
            error = WireError("update of no run, round and device of this site", reason=reason)
            self.answers.tell(device, "ack", ack(update, "refused", str(error)))
            raise error

    async def _stepped(self, device: str, features: Features) -> None:
        """Hand features to the open round; a session whose round is over is told so, that its device may end it."""
        gather = self._gather
        if gather is None and self.run in ("", features.run):
            return  # as with an update
        is_open = gather is not None and (features.run, features.round) == (gather.run, gather.number)
        if gather and self._splitting and is_open:
            if features.start == gather.starts.get(device):
                self._dismiss(device)
            await self._splitting.offer(device, features)
        elif not is_open and is_name(features.run) and self.was_run(features.run):
            self.answers.tell(device, "gradient", skip(features))
        else:
            raise WireError("features of no run, round and device of this site", reason="unknown-run")

    def _dismiss(self, device: str) -> None:
        """Wait no longer for a device that has its payload, or is gone."""
        for one in self._outgoing.get(device, ()):
            one.dismiss(device)

    def _report_double(self, device: str) -> None:
        """Say once that an id is used twice; count every time that the two have thrown each other out."""
        if device not in self._used_twice:
            log.warning(
                "two agents run as device %s and throw each other off the broker: give each board a name of its own",
                device,
            )
        self._used_twice.add(device)
        self.refused["id-in-use"] += 1

    def _refuse(self, device: str, error: WireError) -> None:
        """Count what is not taken; say so once a reason and round, however much of it comes."""
        if not self.refused[error.reason]:
            log.warning("refused a message of %s (%s): %s", device, error.reason, error)
        self.refused[error.reason] += 1
