"""Take the updates of one round: once a device, whole, checked, stored, and only then acknowledged."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from edge_server.config import LinkConfig
from edge_server.store.base import Store, UpdateAccepted
from shared import chunks, payload, spool, wire
from shared.algorithms.base import Result
from shared.clock import Clock
from shared.codecs.base import Codec
from shared.errors import Unreachable, WireError
from shared.messages import Ack, Assignment, Message, Transfer, Update, Verdict, Want
from shared.pace import Pace
from shared.spool import Spool
from shared.topics import topic
from shared.transport.base import Transport
from shared.tree import Tree, check_like
from shared.worker import Worker

log = logging.getLogger(__name__)

TICK_S = 0.25
MIN_WEIGHT, MAX_WEIGHT = 1e-6, 1e12


@dataclass
class _Arrival:
    """One update on its way: what was offered, where its bytes go, how fast they come."""

    update: Update
    spool: Spool
    pace: Pace


@dataclass
class Gather:
    """One open round.

    Attributes:
        expected: Devices that were given a task, with what they were told.
        like: What each device's update must look like.
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
    like: Callable[[str], Tree]
    codec: Codec
    trains: bool
    limit: int
    link: LinkConfig
    accepted: dict[str, UpdateAccepted] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _arrivals: dict[str, _Arrival] = field(default_factory=dict)
    _storing: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _checking: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))

    def path(self, device: str) -> Path:
        """Return where a device's update lies; the next round's will overwrite it."""
        return self.store.folder / "updates" / device

    async def offer(self, device: str, update: Update) -> None:
        """Answer an offer: ask for its frames, or settle it at once.

        Raises:
            WireError: It is in the name of another device.
        """
        if update.device != device:
            raise WireError(f"update in the name of {update.device!r}", reason="identity")
        if device in self.accepted or device in self.failed:
            await self._settle(update, "duplicate")
        elif update.failure is not None:
            log.warning("device %s failed round %d: %s", device, self.number, update.failure)
            self.failed[device] = update.failure
            await self._settle(update, "accepted")
        elif device not in self._storing:
            try:
                _check_figures(update, trains=self.trains)
                if update.params is None:
                    record = self._record(update, 0)
                    await self.worker(self.store.append, record)
                    self.accepted[device] = record
                    await self._settle(update, "accepted")
                else:
                    await self._ask(self._begin(update, update.params))
            except WireError as error:
                await self._refuse(update, error)

    def _begin(self, update: Update, transfer: Transfer) -> _Arrival:
        """Make a place for an update; one that is half here is gone on with."""
        arrival = self._arrivals.get(update.device)
        if arrival and arrival.update.params == transfer:
            arrival.spool.assembly.forget()
            return arrival
        chunks.check(transfer, limit=self.limit)
        self._abandon(update.device)
        path = self.path(update.device)
        path.parent.mkdir(parents=True, exist_ok=True)
        arrival = self._arrivals[update.device] = _Arrival(
            update, Spool(path, transfer), Pace(self.link.patience_s, self.clock())
        )
        return arrival

    async def frame(self, device: str, data: bytes) -> None:
        """Take a frame of an update that was offered.

        Raises:
            WireError: It is damaged or does not fit the offer.
        """
        frame = chunks.decode(data)
        arrival = self._arrivals.get(device)
        if arrival is None or frame.digest != arrival.spool.assembly.transfer.digest:
            return  # of a round that is over, or offered to a server that has restarted since
        arrival.pace.heard(self.clock())
        arrival.spool.write(frame, len(data))
        if arrival.spool.assembly.complete:
            del self._arrivals[device]
            self._storing[device] = asyncio.create_task(self._finish(arrival), name=f"store-{device}")
        else:
            await self._ask(arrival)

    async def _ask(self, arrival: _Arrival) -> None:
        """Ask for the next frames; all devices together have no more under way than the budget."""
        window = max(2, min(self.link.window, self.link.budget // max(1, len(self._arrivals))))
        if ranges := arrival.spool.assembly.ask(window):
            digest = arrival.spool.assembly.transfer.digest
            await self._tell(arrival.update.device, Want(digest=digest, ranges=ranges), assured=False)

    async def watch(self) -> None:
        """Ask again for what does not come, until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            for storing in [task for task in self._storing.values() if task.done()]:
                storing.result()
            now = self.clock()
            for arrival in list(self._arrivals.values()):
                if not arrival.pace.left_s(now):
                    arrival.pace.gave_up(now)
                    arrival.spool.assembly.forget()
                    await self._ask(arrival)

    async def _finish(self, arrival: _Arrival) -> None:
        """Check a whole update and store it; one at a time, since a check maps the whole update into memory."""
        update = arrival.update
        record = self._record(update, arrival.spool.bytes_received)
        try:
            await self.worker(arrival.spool.sync)
            async with self._checking:
                await self.worker(self._keep, arrival, record)
        except WireError as error:
            arrival.spool.close()
            arrival.spool.path.unlink(missing_ok=True)
            if error.reason == "digest":
                self.refused["digest"] += 1
                log.warning("update of %s was damaged on its way, asking for it again", update.device)
            else:
                await self._refuse(update, error)
        else:
            self.accepted[update.device] = record
            await self._settle(update, "accepted")
        del self._storing[update.device]  # not after an error that nobody foresaw: `watch` must find it

    def _keep(self, arrival: _Arrival, record: UpdateAccepted) -> None:
        update = arrival.update
        arrival.spool.finish()
        check_like(read(self.path(update.device), update, self.codec).tree, self.like(update.device))
        self.store.append(record)

    def _record(self, update: Update, bytes_up: int) -> UpdateAccepted:
        return UpdateAccepted(round=self.number, device=update.device, update=update, bytes_up=bytes_up)

    async def _refuse(self, update: Update, error: WireError) -> None:
        self.refused[error.reason] += 1
        self.failed[update.device] = f"refused: {error}"
        log.warning("refused the update of %s in round %d: %s", update.device, self.number, error)
        await self._tell(update.device, ack(update, "refused", str(error)))
        self.changed.set()

    async def _settle(self, update: Update, verdict: Verdict) -> None:
        await self._tell(update.device, ack(update, verdict))
        self.changed.set()

    async def _tell(self, device: str, message: Message, *, assured: bool = True) -> None:
        try:
            await self.transport.publish(topic(self.site, device, "ack"), wire.encode(message), assured=assured)
        except Unreachable as error:
            log.debug("not told, the device will offer again: %s", error)

    def _abandon(self, device: str) -> None:
        if stale := self._arrivals.pop(device, None):
            stale.spool.close()

    async def close(self) -> None:
        """Finish what is being stored, drop what is not whole."""
        await asyncio.gather(*self._storing.values())
        for device in list(self._arrivals):
            self._abandon(device)
            self.path(device).unlink(missing_ok=True)


def ack(update: Update, verdict: Verdict, reason: str = "") -> Ack:
    """Return the word that settles an update."""
    return Ack(run=update.run, round=update.round, device=update.device, verdict=verdict, reason=reason[:500])


def read(path: Path, update: Update, codec: Codec) -> Result:
    """Read a stored update; its tensors are views of the file.

    Raises:
        WireError: It is not of the codec that was asked for.
    """
    coded = codec.decode(payload.unpack(spool.view(path)))
    return Result(coded.tree, update.weight, update.num_examples, update.loss, coded.coverage, update.metrics)


def _check_figures(update: Update, *, trains: bool) -> None:
    """Refuse an update without what was asked for, or with a figure that would spoil a mean."""
    if trains != (update.params is not None):
        raise WireError(
            "the update carries no parameters" if trains else "parameters nobody asked for", reason="params"
        )
    figures = [update.weight, update.loss or 0.0, *update.metrics.values()]
    if not all(math.isfinite(figure) for figure in figures) or update.num_examples < 0:
        raise WireError("a figure of the update is NaN or infinite", reason="not-finite")
    if trains and not MIN_WEIGHT <= update.weight <= MAX_WEIGHT:
        raise WireError(f"weight {update.weight} is not in {MIN_WEIGHT} to {MAX_WEIGHT}", reason="weight")
