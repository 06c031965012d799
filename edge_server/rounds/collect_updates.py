"""Take the updates of one round: once a device, whole, checked, stored, and only then acknowledged.

One update on its way: what was offered, where its bytes go, how fast they come.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from edge_server.config import LinkConfig
from edge_server.fleet.hub import ack
from edge_server.journal.checkpoints import Store
from edge_server.journal.records import UpdateAccepted
from edge_server.rounds.check_update import check
from shared.codecs.base import Codec
from shared.errors import Unreachable, Unwritable, WireError
from shared.protocol import wire
from shared.protocol.messages import Assignment, Message, Transfer, Update, Verdict, Want
from shared.protocol.topics import topic
from shared.runtime.clock import Clock
from shared.runtime.durable import explained
from shared.runtime.executor import Worker
from shared.transfer import frames
from shared.transfer.pace import Pace
from shared.transfer.to_file import Spool
from shared.transport.base import Transport


@dataclass
class Arrival:
    """An update between its offer and its last frame.

    Attributes:
        update: The offer.
        spool: Where its payload goes.
        pace: How fast that comes.
        away: Whether its device is known to be gone.
    """

    update: Update
    spool: Spool
    pace: Pace
    away: bool = False

    def want(self, window: int) -> Want | None:
        """Return what to ask for now, with at most `window` frames under way; None for nothing yet."""
        assembly = self.spool.assembly
        ranges = assembly.ask(self.pace.window(window), self.pace.frame_bytes)
        return (
            Want(digest=assembly.transfer.digest, frame_bytes=self.pace.frame_bytes, ranges=ranges) if ranges else None
        )

    def returned(self, now: float) -> None:
        """Note that the device has connected anew: what was under way is lost."""
        self.away = False
        self.pace.asked_anew(now)
        self.spool.assembly.forget()

    def gave_up(self, now: float) -> bool:
        """Tell whether the device has been silent for too long; what was under way is lost then."""
        if self.pace.left_s(now):
            return False
        self.pace.gave_up(now)
        self.spool.assembly.forget()
        return True


def begin(update: Update, transfer: Transfer, path: Path, link: LinkConfig, now: float) -> Arrival:
    """Make a place for an update, or go on in the one that an earlier process made.

    Raises:
        OSError: The disk is full or cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    frame_bytes = min(transfer.frame_bytes, link.frame_bytes)  # what is under way is counted in frames of ours
    pace = Pace(link.patience_s, now, frame_bytes)
    pace.begin_small()  # a broker hangs up on a device whose frame outlasts the keep-alive; its link is not known yet
    return Arrival(update, Spool(path, transfer), pace)


log = logging.getLogger(__name__)

TICK_S, ATTEMPTS = 0.25, 3  # an update that rotted on its device comes no better the fourth time


@dataclass
class Gather:
    """One open round.

    Attributes:
        expected: Devices that were given a task, with what they were told.
        require: Raises WireError where what a device sent is not what its update must look like.
        starts: Digest of the parameters that each device was given.
        accepted: Updates that are stored, by device.
        failed: Devices that could not, with the cause.
        refused: What was not taken, counted by reason.
        trains: Whether an update carries parameters; if not, the devices only evaluate.
        limit: Largest payload taken, in bytes.
    """

    site: str
    transport: Transport
    store: Store
    clock: Clock
    worker: Worker
    run: str
    number: int
    expected: Mapping[str, Assignment]
    require: Callable[[Path, Update], None]
    starts: Mapping[str, bytes]
    codec: Codec
    trains: bool
    limit: int
    link: LinkConfig
    accepted: dict[str, UpdateAccepted] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _arrivals: dict[str, Arrival] = field(default_factory=dict)
    _damaged: Counter[str] = field(default_factory=Counter)
    _storing: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _checking: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))

    def path(self, device: str) -> Path:
        """Return where a device's update lies; the next round's will overwrite it."""
        return self.store.updates / device

    async def offer(self, device: str, update: Update) -> None:
        """Answer an offer: ask for its frames, or settle it at once.

        Raises:
            WireError: It is in the name of another device.
        """
        if update.device != device:
            raise WireError(f"update in the name of {update.device!r}", reason="identity")
        if update.start and update.start != self.starts[device]:
            await self._settle(update, "late")  # trained before this round was begun anew
        elif device in self.accepted or device in self.failed:
            await self._settle(update, "duplicate")
        elif device in self._storing:
            return  # its verdict is on the way
        elif update.failure is not None:
            self._drop(device)
            log.warning("device %s failed round %d: %s", device, self.number, update.failure)
            self.failed[device] = update.failure
            await self._settle(update, "accepted")
        else:
            try:
                with explained(self.path(device)):
                    await self._take(update)
            except Unwritable as error:
                self._unstored(device, error)
            except WireError as error:
                await self._refuse(update, error)

    async def _take(self, update: Update) -> None:
        check(update, trains=self.trains)
        if update.params is None:
            record = self._record(update, 0)
            await self.worker(self.store.append, record)
            self.accepted[update.device] = record
            await self._settle(update, "accepted")
        else:
            await self._go_on(self._begin(update, update.params))

    def _begin(self, update: Update, transfer: Transfer) -> Arrival:
        """Make a place for an update; one that is half here is gone on with."""
        arrival = self._arrivals.get(update.device)
        if arrival and arrival.update.params == transfer:
            arrival.away = False
            return arrival  # what it was asked for may still be on a slow link
        frames.check(transfer, limit=self.limit)
        if arrival:
            self._arrivals.pop(update.device).spool.close()
        arrival = begin(update, transfer, self.path(update.device), self.link, self.clock())
        return self._arrivals.setdefault(update.device, arrival)

    async def returned(self, device: str) -> None:
        """Ask a device that has connected anew for all that lacks: what was under way is lost."""
        if arrival := self._arrivals.get(device):
            arrival.returned(self.clock())
            await self._ask(arrival)

    def gone(self, device: str) -> None:
        """Leave to the others the share of the window of a device that went away."""
        if arrival := self._arrivals.get(device):
            arrival.away = True

    async def frame(self, device: str, data: bytes) -> None:
        """Take a frame of an update that was offered.

        Raises:
            WireError: It is damaged or does not fit the offer.
        """
        frame = frames.decode(data)
        arrival = self._arrivals.get(device)
        if arrival is None or frame.digest != arrival.spool.assembly.transfer.digest:
            return  # of a round that is over, or offered to a server that has restarted since
        arrival.pace.heard(self.clock(), frame.data.nbytes)
        try:
            with explained(arrival.spool.path):
                arrival.spool.write(frame, len(data))
                await self._go_on(arrival)
        except Unwritable as error:
            self._unstored(device, error)

    async def _go_on(self, arrival: Arrival) -> None:
        """Store an update that is whole, which it may be from an earlier process's time; else ask for more of it."""
        device = arrival.update.device
        if arrival.spool.assembly.complete:
            del self._arrivals[device]
            self._storing[device] = asyncio.create_task(self._finish(arrival), name=f"store-{device}")
        else:
            await self._ask(arrival)

    async def _ask(self, arrival: Arrival) -> None:
        """Ask for the next frames; all devices together have no more under way than the budget."""
        senders = sum(not one.away for one in self._arrivals.values())
        window = max(2, min(self.link.window, self.link.budget // max(1, senders)))
        if want := arrival.want(window):
            await self._tell(arrival.update.device, want, assured=False)

    async def watch(self) -> None:
        """Ask again for what does not come, until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            for storing in [task for task in self._storing.values() if task.done()]:
                storing.result()
            for arrival in list(self._arrivals.values()):
                if arrival.gave_up(self.clock()):
                    await self._ask(arrival)

    async def _finish(self, arrival: Arrival) -> None:
        """Check a whole update and store it; one at a time, since a check maps the whole update into memory."""
        record = self._record(arrival.update, arrival.spool.bytes_received)
        log.debug("phase storing run=%s round=%d device=%s", self.run, self.number, record.device)
        try:
            with explained(arrival.spool.path):
                await self.worker(arrival.spool.sync)
            async with self._checking:
                await self.worker(self._keep, arrival, record)
        except Unwritable as error:
            arrival.spool.close()
            self._unstored(record.device, error)
        except WireError as error:
            arrival.spool.remove()
            self._damaged[record.device] += 1
            if error.reason == "digest" and self._damaged[record.device] < ATTEMPTS:
                self.refused["digest"] += 1
                log.warning("update of %s was damaged on its way, it will be asked for again", record.device)
            else:
                await self._refuse(record.update, error)
        else:
            self.accepted[record.device] = record
            await self._settle(record.update, "accepted")
        del self._storing[record.device]  # not after an error that nobody foresaw: `watch` must find it

    def _keep(self, arrival: Arrival, record: UpdateAccepted) -> None:
        with explained(arrival.spool.path):
            arrival.spool.finish()
            self.require(self.path(record.device), record.update)
        self.store.append(record)
        log.debug("phase stored run=%s round=%d device=%s", self.run, self.number, record.device)

    def _unstored(self, device: str, error: Unwritable) -> None:
        """Do without an update that the disk does not take: the device keeps it and offers it again."""
        if not self.refused["disk"]:
            log.error("the update of %s waits on the device: %s", device, error)
        self.refused["disk"] += 1
        self._drop(device)  # half of it may take the room that another one needs

    def _drop(self, device: str) -> None:
        if stale := self._arrivals.pop(device, None):
            with suppress(OSError):
                stale.spool.remove()

    def _record(self, update: Update, size: int) -> UpdateAccepted:
        return UpdateAccepted(round=self.number, device=update.device, update=update, bytes_up=size, at=self.clock())

    async def _refuse(self, update: Update, error: WireError) -> None:
        self.refused[error.reason] += 1
        self.failed[update.device] = f"refused: {error}"
        self._drop(update.device)
        log.warning("refused the update of %s in round %d: %s", update.device, self.number, error)
        await self._tell(update.device, ack(update, "refused", str(error)))
        self.changed.set()

    async def _settle(self, update: Update, verdict: Verdict) -> None:
        await self._tell(update.device, ack(update, verdict))
        log.debug("phase %s run=%s round=%d device=%s", verdict, self.run, self.number, update.device)
        self.changed.set()

    async def _tell(self, device: str, message: Message, *, assured: bool = True) -> None:
        try:
            await self.transport.publish(topic(self.site, device, "ack"), wire.encode(message), assured=assured)
        except Unreachable as error:
            log.debug("not told, the device will offer again: %s", error)

    async def close(self) -> None:
        """Finish what is being stored, drop what is not whole."""
        await asyncio.gather(*self._storing.values())
        for device in list(self._arrivals):
            self._drop(device)
