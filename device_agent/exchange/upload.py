"""Deliver updates from the outbox until the server acknowledges them."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

import msgspec

from device_agent.exchange.outbox import Entry, Outbox
from device_agent.exchange.token_bucket import TokenBucket
from device_agent.exchange.upload_meter import UploadMeter
from shared.errors import Unreachable, WireError
from shared.protocol import wire
from shared.protocol.messages import INLINE_BYTES, PAYLOAD, Ack, Assignment, Status, Transfer, Update, Want
from shared.protocol.payload import Scattered
from shared.protocol.topics import SERVER, topic
from shared.runtime import backports
from shared.runtime.executor import background
from shared.runtime.phases import log_phase
from shared.transfer import frames
from shared.transfer.sender import Sender
from shared.transport.base import Delivery as Arrival
from shared.transport.base import Inbox, Transport

log = logging.getLogger(__name__)

FIRST_PATIENCE_S, LAST_PATIENCE_S = 2.0, 30.0
MAX_WAIT_S = 5.0
"""Longest wait before the rate is read again: a newer task may have changed it."""

WAKE_SIGNAL: Arrival = ("", b"")
"""Inserted between the server's messages when `Delivery.wake` is set, so that one inbox is enough to wait on."""

MAX_DEFERRED = 64
"""Messages received while a frame waits for the rate; handled afterwards. The server repeats those beyond the limit."""


@dataclass
class DeferringInbox:
    """The server's messages, of which some may be deferred while a frame waits for the rate."""

    inbox: Inbox = field(default_factory=Inbox)
    _deferred: deque[Arrival] = field(default_factory=lambda: deque(maxlen=MAX_DEFERRED))

    async def take(self) -> Arrival:
        """Return the next message, deferred ones first."""
        return self._deferred.popleft() if self._deferred else await self.receive()

    async def receive(self) -> Arrival:
        """Return the next message that was not deferred."""
        return await anext(self.inbox)

    def defer(self, arrival: Arrival) -> None:
        """Set a message aside for `take`."""
        self._deferred.append(arrival)


@dataclass
class Delivery:
    """Offer each update, send the requested frames, remove the update when it is acknowledged.

    Attributes:
        wake: Set it when the outbox has a new entry.
        jitter: Spreads the offers of a fleet in time; seeded in replay.
        on_void: Called for an update whose task must be trained again.
        bucket: Paces frames to the rate that the newest task allows; None if the transport does.
    """

    transport: Transport
    site: str
    device: str
    outbox: Outbox
    jitter: Random = field(default_factory=Random)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    uploads: UploadMeter = field(default_factory=UploadMeter)
    on_void: Callable[[Ack], None] = lambda _: None
    bucket: TokenBucket | None = field(default_factory=TokenBucket)
    _patience_s: float = FIRST_PATIENCE_S
    _server_knows: tuple[str, ...] = ()
    _arrivals: DeferringInbox = field(default_factory=DeferringInbox)

    def allow(self, assignment: Assignment) -> None:
        """Apply the upload rate of a task's assignment, if it names one."""
        if self.bucket:
            self.bucket.tune(assignment.allocation.up_bits_per_s, assignment.allocation.share or 0.0)

    async def run(self) -> None:
        """Deliver until cancelled; `wake` reports a new entry or that the server may be back."""
        patterns = topic(self.site, self.device, "ack"), topic(self.site, SERVER, "status")
        async with self.transport.subscribe(*patterns) as inbox, background(self._announce(inbox)):
            self._arrivals.inbox = inbox
            while True:
                entries = self.outbox.entries()
                for entry in entries:
                    await self._offer(entry)
                await self._serve_until_wake({self._name(entry.update): entry for entry in entries})

    async def _announce(self, inbox: Inbox) -> None:
        while True:
            await self.wake.wait()
            self.wake.clear()
            inbox.put(WAKE_SIGNAL)

    async def _offer(self, entry: Entry) -> None:
        update = entry.update
        if update.params:  # as large a frame as this broker takes may be smaller than when the update was written
            frame_bytes = frames.largest_frame(update.params.frame_bytes, self.transport.max_payload_bytes)
            params = msgspec.structs.replace(update.params, frame_bytes=frame_bytes)
            update = msgspec.structs.replace(update, params=params, payload=self._inline_payload(entry, params))
        started = self.uploads.begin() if update.payload else 0.0
        try:
            # The next offer has no payload, and is assured: one with its payload need not be.
            name, is_assured = topic(self.site, self.device, "update"), not update.payload
            await self.transport.publish(name, wire.encode(update), assured=is_assured)
        except Unreachable as error:
            log.debug("offer waits: %s", error)
            return
        if update.payload:
            carried = len(update.payload) + frames.HEADER_BYTES  # as in one frame
            self.uploads.add(update, started, carried)
            self.uploads.bytes_sent += carried

    def _inline_payload(self, entry: Entry, params: Transfer) -> bytes:
        """Return a small payload's content if the server takes it inside the update and no rate applies.

        Only once: if the server has not received it, it requests frames after the next offer.
        """
        most = min(INLINE_BYTES, self.transport.max_payload_bytes // 2)  # the rest of the update needs room too
        is_paced = self.bucket is not None and self.bucket.bits_per_s is not None
        if PAYLOAD not in self._server_knows or params.size > most or is_paced or self.uploads.has_begun(entry.update):
            return b""
        try:
            return bytes(entry.content)
        except FileNotFoundError as error:
            log.debug("not offered with its content: %s", error)
            return b""

    async def _serve_until_wake(self, entries: dict[tuple[str, int], Entry]) -> None:
        """Answer the server until updates are due to be offered again: on a new entry or after a long silence."""
        while True:
            patience = self._patience_s * self.jitter.uniform(0.75, 1.25) if entries else None
            try:
                async with backports.timeout(patience):
                    arrival = await self._arrivals.take()
            except TimeoutError:
                self._patience_s = min(2 * self._patience_s, LAST_PATIENCE_S)
                return
            if arrival is WAKE_SIGNAL or await self._answer(arrival, entries):
                return
            self._patience_s = FIRST_PATIENCE_S

    async def _answer(self, arrival: Arrival, entries: dict[tuple[str, int], Entry]) -> bool:
        """Handle a message; return whether all updates should be offered again."""
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
                self._handle_ack(message, entries)
            case Status():
                self._server_knows = message.knows
                self.outbox.forget(message.ended)
                return message.online and bool(entries)
            case _:
                log.warning("not for delivery: %s", type(message).__name__)
        return False

    def _handle_ack(self, ack: Ack, entries: dict[tuple[str, int], Entry]) -> None:
        entry = entries.get((ack.run, ack.round))
        if entry and entry.update.start == ack.start:  # not one of an earlier try of the same round
            self._settle(entries.pop((ack.run, ack.round)), ack)

    async def _send(self, entry: Entry, entries: dict[tuple[str, int], Entry], want: Want) -> None:
        assert entry.update.params, "the server requests only updates with a payload"
        started, carried = self.uploads.begin(), 0
        try:
            sender = Sender(entry.update.params, Scattered([entry.content]))
            for frame in sender.answer(want, self.transport.max_payload_bytes):
                if not await self._pace(len(frame), entry, entries):
                    return
                await self.transport.publish(topic(self.site, self.device, "update"), frame, assured=False)
                if self.bucket:
                    self.bucket.note_sent(self.uploads.clock())
                self.uploads.bytes_sent += len(frame)
                carried += len(frame)
        except (WireError, Unreachable, FileNotFoundError) as error:
            log.debug("frames not sent, the server will ask again: %s", error)
        finally:
            if self._name(entry.update) in entries:
                self.uploads.add(entry.update, started, carried)

    async def _pace(self, size: int, entry: Entry, entries: dict[tuple[str, int], Entry]) -> bool:
        """Wait until a frame may be sent; return False if its update was acknowledged meanwhile."""
        if not self.bucket:
            return True
        tuned, due = self.bucket.tuned, self.uploads.clock() + self.bucket.take(size, self.uploads.clock())
        waited = False
        while (wait_s := due - self.uploads.clock()) > 0:
            waited = True
            with suppress(TimeoutError):
                async with backports.timeout(min(wait_s, MAX_WAIT_S)):
                    await self._receive_while_paced(entries)
            if self._name(entry.update) not in entries:
                return False
            if self.bucket.tuned != tuned:  # a newer task has brought another rate
                tuned, due = self.bucket.tuned, self.uploads.clock() + self.bucket.take(size, self.uploads.clock())
        if waited:
            self.uploads.link.note_pause()
        return True

    async def _receive_while_paced(self, entries: dict[tuple[str, int], Entry]) -> None:
        """Handle acknowledgements at once; defer every other message."""
        arrival = await self._arrivals.receive()
        with suppress(WireError):
            if arrival is not WAKE_SIGNAL and isinstance(message := wire.decode(arrival[1]), Ack):
                self._handle_ack(message, entries)
                return
        self._arrivals.defer(arrival)

    def _settle(self, entry: Entry, ack: Ack) -> None:
        if ack.verdict == "refused":
            log.error("round %d: the server refused the update: %s", ack.round, ack.reason)
        elif entry.update.failure is not None:
            log.info("run %s round %d: the server knows that it failed", ack.run, ack.round)
        else:
            log.info("settled run=%s round=%d verdict=%s", ack.run, ack.round, ack.verdict)
            log_phase(log, "idle", run=ack.run, round=ack.round)
        self.uploads.finish(entry.update, is_void=ack.verdict == "void")
        self.outbox.remove(entry)
        if ack.verdict == "void":
            self.on_void(ack)

    @staticmethod
    def _name(update: Update) -> tuple[str, int]:
        return update.run, update.round
