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
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import msgspec

from device_agent.exchange.outbox import Entry, Outbox
from device_agent.measurement.link_meter import LinkMeter
from shared.errors import Unreachable, WireError
from shared.protocol import wire
from shared.protocol.measurements import Cost
from shared.protocol.messages import Ack, Assignment, Status, Transfer, Update, Want
from shared.protocol.payload import Scattered
from shared.protocol.topics import SERVER, topic
from shared.runtime.clock import Clock, monotonic
from shared.runtime.executor import background
from shared.transfer import frames
from shared.transfer.sender import Sender
from shared.transport.base import Delivery as Arrival
from shared.transport.base import Inbox, Transport

BURST_S, MOST_CREDIT_S = 0.1, 5.0
"""Seconds of the rate that may go at once: after a silence, and on a link that could not keep up."""


@dataclass
class Bucket:
    """Paces what passes. Takes its time as input.

    Attributes:
        bits_per_s: The rate; None for no limit.
        link_bits_per_s: What the link itself carries; infinite where nobody knows.
    """

    bits_per_s: float | None = None
    link_bits_per_s: float = math.inf
    _free_at: float = -math.inf
    _busy_until: float = -math.inf

    def tune(self, bits_per_s: float | None, share: float = 0.0) -> None:
        """Begin anew at another rate, which is that share of the link's, 0 for nobody knows; no rate is no limit."""
        usable = bits_per_s is not None and math.isfinite(bits_per_s) and bits_per_s > 0
        self.bits_per_s = bits_per_s if usable else None
        self.link_bits_per_s = bits_per_s / share if bits_per_s and usable and 0 < share <= 1 else math.inf
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


log = logging.getLogger(__name__)

FIRST_PATIENCE_S, LAST_PATIENCE_S = 2.0, 30.0
NEWS: Arrival = ("", b"")
"""Comes between the server's messages when `Delivery.wake` was set, so that there is one thing to wait for."""


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
        clock: Time.
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

    def allow(self, told: Assignment) -> None:
        """Keep to the rate that a task's assignment allows from now on, if it names one."""
        if self.bucket:
            self.bucket.tune(told.allocated.up_bits_per_s, told.allocated.share or 0.0)

    async def run(self) -> None:
        """Deliver for ever; `wake` says that the outbox has something new or that the server may be back."""
        patterns = topic(self.site, self.device, "ack"), topic(self.site, SERVER, "status")
        async with self.transport.subscribe(*patterns) as inbox, background(self._announce(inbox)):
            while True:
                entries = self.outbox.entries()
                for entry in entries:
                    await self._offer(entry.update)
                await self._until_wake(inbox, {self._name(entry.update): entry for entry in entries})

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

    async def _until_wake(self, inbox: Inbox, entries: dict[tuple[str, int], Entry]) -> None:
        """Answer the server until there is reason to offer again: something new, or too long a silence."""
        while True:
            patience = self._patience_s * self.jitter.uniform(0.75, 1.25) if entries else None
            try:
                async with asyncio.timeout(patience):
                    arrival = await anext(inbox)
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
                        await self._send(entry, entry.update.params, message)
                        break  # another entry of the same content has the same frames
            case Ack():
                settled = entries.get((message.run, message.round))
                if settled and settled.update.start == message.start:  # not one of an earlier try of the same round
                    self._settle(entries.pop((message.run, message.round)), message)
            case Status():
                return message.online and bool(entries)
            case _:
                log.warning("not for delivery: %s", type(message).__name__)
        return False

    async def _send(self, entry: Entry, transfer: Transfer, want: Want) -> None:
        self.link.uploading()
        self.sending()
        name = *self._name(entry.update), entry.update.start  # a round that is repeated begins to count anew
        started, carried = self._asked.get(name, (self.clock(), 0))
        try:
            sender = Sender(transfer, Scattered([entry.content]))
            for frame in sender.answer(want, self.transport.max_payload_bytes):
                await self._pace(len(frame))
                await self.transport.publish(topic(self.site, self.device, "update"), frame, assured=False)
                if self.bucket:
                    self.bucket.gone(self.clock())
                self.bytes_sent += len(frame)
                carried += len(frame)
        except (WireError, Unreachable, FileNotFoundError) as error:
            log.debug("frames not sent, the server will ask again: %s", error)
        finally:
            self._asked[name] = started, carried

    async def _pace(self, size: int) -> None:
        """Wait until a frame may go."""
        if self.bucket and (wait_s := self.bucket.take(size, self.clock())) > 0:
            await asyncio.sleep(wait_s)
            self.link.paced()

    def _settle(self, entry: Entry, ack: Ack) -> None:
        if ack.verdict == "refused":
            log.error("round %d: the server refused the update: %s", ack.round, ack.reason)
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
