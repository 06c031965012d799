"""Bring updates from the outbox to the server, and keep them until it has settled them.

A token bucket: when the next frame may go, so that a sender keeps to a rate that it was given.

A frame goes so that its last bit leaves when it would have left a link of that rate: earlier by what the link itself
takes for it, where that is known. Tokens gather while the sender is busy, so that the link, which takes its time too,
costs none of the rate; of a silence, only those of its last moment are kept, and another rate begins with none.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

import msgspec

from device_agent.exchange.outbox import Entry, Outbox
from device_agent.measurement.link_meter import LinkMeter
from shared.errors import Unreachable, WireError
from shared.protocol import wire
from shared.protocol.measurements import Cost
from shared.protocol.messages import Ack, Assignment, Status, Update, Want
from shared.protocol.payload import Scattered
from shared.protocol.topics import SERVER, topic
from shared.runtime import backports
from shared.runtime.clock import Clock, monotonic
from shared.runtime.executor import background
from shared.transfer import frames
from shared.transfer.sender import Sender
from shared.transport.base import Delivery as Arrival
from shared.transport.base import Inbox, Transport

BURST_S, MOST_CREDIT_S = 0.1, 5.0
"""Seconds of the rate that may go at once: after a silence, and on a link that could not keep up."""
LEAST_BITS_PER_S = 1000.0
"""A rate below that is taken for that: a frame must come to its end within somebody's patience."""
MOST_WAIT_S = 5.0
"""Between two looks at the rate; a newer task may have brought another."""

log = logging.getLogger(__name__)
NEWS: Arrival = ("", b"")
"""Comes between the server's messages when `Delivery.wake` was set, so that there is one thing to wait for."""

MOST_ASIDE = 64
"""What came while a frame waited to go, and is answered when all of them have gone; the server says the rest again."""


@dataclass
class Bucket:
    """Paces what passes. Takes its time as input.

    Attributes:
        bits_per_s: The rate; None for no limit.
        link_bits_per_s: What the link itself carries; infinite where nobody knows.
        tuned: How often another rate was set.
    """

    bits_per_s: float | None = None
    link_bits_per_s: float = math.inf
    tuned: int = 0
    _free_at: float = -math.inf
    _busy_until: float = -math.inf

    def tune(self, bits_per_s: float | None, share: float = 0.0) -> None:
        """Begin anew at another rate, which is that share of the link's, 0 for nobody knows; no rate is no limit."""
        self.tuned += 1
        usable = bits_per_s is not None and math.isfinite(bits_per_s) and bits_per_s > 0
        self.bits_per_s = max(bits_per_s, LEAST_BITS_PER_S) if bits_per_s is not None and usable else None
        self.link_bits_per_s = self.bits_per_s / share if self.bits_per_s and 0 < share <= 1 else math.inf
        self._free_at = self._busy_until = -math.inf

    def take(self, size: int, now: float) -> float:
        """Return the seconds to wait before a frame of `size` bytes, which is next, may go."""
        if not self.bits_per_s:
            return 0.0
        if self._busy_until == -math.inf:
            self._free_at = self._busy_until = now
        silence_s = max(0.0, now - self._busy_until - BURST_S)
        start = max(self._free_at + silence_s, now - MOST_CREDIT_S)
        self._free_at = start + 8 * size / self.bits_per_s
        return max(0.0, self._free_at - 8 * size / self.link_bits_per_s - now)

    def gone(self, now: float) -> None:
        """Note that a frame has gone."""
        self._busy_until = now


FIRST_PATIENCE_S, LAST_PATIENCE_S = 2.0, 30.0


@dataclass(frozen=True)
class Sent:
    """What bringing one settled update to the server took.

    Attributes:
        started: When its first frame was asked for; where none was, when it was settled.
        ended: When it was settled.
        bytes_up: Bytes of its frames, with those that were sent again.
        cost: What it cost before.
    """

    run: str
    round: int
    started: float
    ended: float
    bytes_up: int
    cost: Cost = field(default_factory=Cost)


@dataclass
class Delivery:
    """Offers each update, sends the frames the server asks for, forgets the update when it is acknowledged.

    Attributes:
        wake: Set it when the outbox has something new.
        jitter: Spreads the offers of a fleet in time; seeded in replay.
        link: Is told when frames are asked for and when an update is settled.
        sending: Called whenever frames are asked for.
        sent: Called for every update that is settled.
        voided: Called for one whose task is to be done anew.
        bytes_sent: Bytes of frames.
        bucket: Paces frames to the rate that the newest task allows; None where whoever carries them does.
    """

    transport: Transport
    site: str
    device: str
    outbox: Outbox
    jitter: Random = field(default_factory=Random)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    clock: Clock = monotonic
    link: LinkMeter = field(default_factory=LinkMeter)
    sending: Callable[[], None] = lambda: None
    sent: Callable[[Sent], None] = lambda _: None
    voided: Callable[[Ack], None] = lambda _: None
    bytes_sent: int = 0
    bucket: Bucket | None = field(default_factory=Bucket)
    _asked: dict[tuple[str, int, bytes], tuple[float, int]] = field(default_factory=dict)
    _patience_s: float = FIRST_PATIENCE_S
    _inbox: Inbox = field(default_factory=Inbox)
    _aside: deque[Arrival] = field(default_factory=lambda: deque(maxlen=MOST_ASIDE))

    def allow(self, told: Assignment) -> None:
        """Keep to the rate that a task's assignment allows from now on, if it names one."""
        if self.bucket:
            self.bucket.tune(told.allocation.up_bits_per_s, told.allocation.share or 0.0)

    async def run(self) -> None:
        """Deliver for ever; `wake` says that the outbox has something new or that the server may be back."""
        patterns = topic(self.site, self.device, "ack"), topic(self.site, SERVER, "status")
        async with self.transport.subscribe(*patterns) as self._inbox, background(self._announce(self._inbox)):
            while True:
                entries = self.outbox.entries()
                for entry in entries:
                    await self._offer(entry.update)
                await self._until_wake({self._name(entry.update): entry for entry in entries})

    async def _announce(self, inbox: Inbox) -> None:
        while True:
            await self.wake.wait()
            self.wake.clear()
            inbox.put(NEWS)

    async def _offer(self, update: Update) -> None:
        if update.params:  # as large a frame as this broker takes may be smaller than when the update was written
            frame_bytes = frames.largest_frame(update.params.frame_bytes, self.transport.max_payload_bytes)
            params = msgspec.structs.replace(update.params, frame_bytes=frame_bytes)
            update = msgspec.structs.replace(update, params=params)
        try:
            await self.transport.publish(topic(self.site, self.device, "update"), wire.encode(update))
        except Unreachable as error:
            log.debug("offer waits: %s", error)

    async def _until_wake(self, entries: dict[tuple[str, int], Entry]) -> None:
        """Answer the server until there is reason to offer again: something new, or too long a silence."""
        while True:
            patience = self._patience_s * self.jitter.uniform(0.75, 1.25) if entries else None
            try:
                async with backports.timeout(patience):
                    arrival = self._aside.popleft() if self._aside else await anext(self._inbox)
            except TimeoutError:
                self._patience_s = min(2 * self._patience_s, LAST_PATIENCE_S)
                return
            if arrival is NEWS or await self._answer(arrival, entries):
                return
            self._patience_s = FIRST_PATIENCE_S

    async def _answer(self, arrival: Arrival, entries: dict[tuple[str, int], Entry]) -> bool:
        """Do what the server asks; tell whether everything should be offered anew."""
        try:
            message = wire.decode(arrival[1])
        except WireError as error:
            log.warning("dropped: %s", error)
            return False
        match message:
            case Want():
                for entry in entries.values():
                    if entry.update.params and entry.update.params.digest == message.digest:
                        await self._send(entry, entries, message)
                        break  # another entry of the same content has the same frames
            case Ack():
                self._hear_ack(message, entries)
            case Status():
                self.outbox.forget(message.ended)
                return message.online and bool(entries)
            case _:
                log.warning("not for delivery: %s", type(message).__name__)
        return False

    def _hear_ack(self, ack: Ack, entries: dict[tuple[str, int], Entry]) -> None:
        settled = entries.get((ack.run, ack.round))
        if settled and settled.update.start == ack.start:  # not one of an earlier try of the same round
            self._settle(entries.pop((ack.run, ack.round)), ack)

    async def _send(self, entry: Entry, entries: dict[tuple[str, int], Entry], want: Want) -> None:
        assert entry.update.params, "what is wanted has a payload"
        self.link.uploading()
        self.sending()
        name = *self._name(entry.update), entry.update.start  # a round that is repeated begins to count anew
        started, carried = self._asked.get(name, (self.clock(), 0))
        try:
            sender = Sender(entry.update.params, Scattered([entry.content]))
            for frame in sender.answer(want, self.transport.max_payload_bytes):
                if not await self._pace(len(frame), entry, entries):
                    return
                await self.transport.publish(topic(self.site, self.device, "update"), frame, assured=False)
                if self.bucket:
                    self.bucket.gone(self.clock())
                self.bytes_sent += len(frame)
                carried += len(frame)
        except (WireError, Unreachable, FileNotFoundError) as error:
            log.debug("frames not sent, the server will ask again: %s", error)
        finally:
            if self._name(entry.update) in entries:
                self._asked[name] = started, carried

    async def _pace(self, size: int, entry: Entry, entries: dict[tuple[str, int], Entry]) -> bool:
        """Wait until a frame may go; tell whether it still should: its update may have been settled meanwhile.

        Args:
            entry: Whose frame it is.
            entries: All that were offered.
        """
        if not self.bucket:
            return True
        tuned, due = self.bucket.tuned, self.clock() + self.bucket.take(size, self.clock())
        waited = False
        while (wait_s := due - self.clock()) > 0:
            waited = True
            with suppress(TimeoutError):
                async with backports.timeout(min(wait_s, MOST_WAIT_S)):
                    await self._hear_meanwhile(entries)
            if self._name(entry.update) not in entries:
                return False
            if self.bucket.tuned != tuned:  # a newer task has brought another rate
                tuned, due = self.bucket.tuned, self.clock() + self.bucket.take(size, self.clock())
        if waited:
            self.link.paced()
        return True

    async def _hear_meanwhile(self, entries: dict[tuple[str, int], Entry]) -> None:
        """Settle what the server settles; put aside what else it says."""
        arrival = await anext(self._inbox)
        with suppress(WireError):
            if arrival is not NEWS and isinstance(message := wire.decode(arrival[1]), Ack):
                self._hear_ack(message, entries)
                return
        self._aside.append(arrival)

    def _settle(self, entry: Entry, ack: Ack) -> None:
        if ack.verdict == "refused":
            log.error("round %d: the server refused the update: %s", ack.round, ack.reason)
        elif entry.update.failure is not None:
            log.info("run %s round %d: the server knows that it failed", ack.run, ack.round)
        else:
            log.info("settled run=%s round=%d verdict=%s", ack.run, ack.round, ack.verdict)
        self.link.uploaded()
        ended = self.clock()
        name = *self._name(entry.update), entry.update.start
        started, carried = self._asked.pop(name, (ended, 0))
        self.outbox.remove(entry)
        if ack.verdict == "void":
            self.voided(ack)
            return
        self.sent(
            Sent(run=ack.run, round=ack.round, started=started, ended=ended, bytes_up=carried, cost=entry.update.cost)
        )

    @staticmethod
    def _name(update: Update) -> tuple[str, int]:
        return update.run, update.round
