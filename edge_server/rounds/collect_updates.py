"""Collect the updates of a round: receive, check, store, then acknowledge."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from edge_server.fleet.answers import Answers, build_ack
from edge_server.journal.checkpoints import Store
from edge_server.journal.group_commit import GroupCommit
from edge_server.journal.records import UpdateAccepted
from edge_server.plan.server_config import LinkConfig
from edge_server.rounds.check_update import check_sums, check_update, require_trained
from shared.codecs.base import Codec
from shared.data.moments import INPUT_NAMES
from shared.errors import Diverged, Unreachable, Unwritable, WireError
from shared.protocol import payload, wire
from shared.protocol.messages import INLINE_BYTES, Assignment, Message, Transfer, Update, Verdict
from shared.protocol.topics import topic
from shared.runtime.clock import Clock
from shared.runtime.durable import explain_disk_errors
from shared.runtime.executor import Worker
from shared.runtime.phases import log_phase
from shared.transfer import frames
from shared.transfer.pace import describe_ceiling
from shared.transfer.receiver import Allowance, Policy, Receiver
from shared.transfer.to_file import FileSink
from shared.transport.base import Transport

log = logging.getLogger(__name__)

TICK_S = 0.25


@dataclass
class Arrival:
    """An update between its offer and its last frame.

    Attributes:
        is_offline: Whether its device is known to be disconnected.
    """

    update: Update
    payload: Receiver[FileSink]
    is_offline: bool = False


@dataclass
class Candidate:
    """A complete update that waits to be checked and recorded.

    Attributes:
        arrival: Its parameters as received in frames; None for others.
        content: Its parameters as received inside the update.
        error: Why it was not recorded.
    """

    record: UpdateAccepted
    arrival: Arrival | None = None
    content: bytes = b""
    error: Unwritable | WireError | None = None


@dataclass
class Gather:
    """Update collection of one open round.

    Attributes:
        expected: Assignments of all devices with a task, by device.
        require: Returns the norm of a stored update; raises WireError if its content is not acceptable.
        starts: Digest of the parameters that each device received.
        accepted: Stored updates, by device.
        failed: Causes of failure, by device.
        refused: Counts of rejected messages, by reason.
        trains: Whether updates carry parameters; false if devices only evaluate. None if both may occur; such updates
            are stored beside those of the round.
        limit: Largest accepted payload, in bytes.
        turned_away: Number of updates that could not be written to disk.
        ceilings: Largest frame in bytes that passes, for devices whose larger frames were lost; shared by all rounds.
        norms: Norms of the updates checked by this process, by device.
        metrics: Names of the metrics of which updates carry sums.
    """

    site: str
    transport: Transport
    store: Store
    clock: Clock
    worker: Worker
    run: str
    number: int
    expected: Mapping[str, Assignment]
    require: Callable[[memoryview, Update], float]
    starts: Mapping[str, bytes]
    codec: Codec
    trains: bool | None
    limit: int
    link: LinkConfig
    accepted: dict[str, UpdateAccepted] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    turned_away: int = 0
    norms: dict[str, float] = field(default_factory=dict)
    ceilings: dict[str, int] = field(default_factory=dict)
    metrics: Collection[str] = ()
    _paths: dict[str, Path] = field(default_factory=dict)
    _arrivals: dict[str, Arrival] = field(default_factory=dict)
    _expected: dict[str, Allowance] = field(default_factory=dict)
    _storing: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _coming: asyncio.Event = field(default_factory=asyncio.Event)
    _commit: GroupCommit[Candidate] = field(init=False)
    _policy: Policy = field(init=False)
    _answers: Answers = field(init=False)

    def __post_init__(self) -> None:
        self._policy = self.link.policy(self.limit)
        self._commit = GroupCommit(lambda candidates: self.worker(self._check_and_record, candidates))
        self._answers = Answers(self.site, self.transport, self.clock)

    def path(self, device: str) -> Path:
        """Return the file of a device's update; the next round overwrites it."""
        if device not in self._paths:
            self._paths[device] = self.store.updates / self._name(device)
        return self._paths[device]

    def _name(self, device: str) -> str:
        return device if self.trains is not None else f"{device}~"

    def content(self, device: str) -> memoryview:
        """Return the parameters of an accepted update. Raises FileNotFoundError if they were deleted."""
        params = self.accepted[device].update.params
        if params is None:
            raise FileNotFoundError(f"the update of {device} has no parameters")
        return self.store.read_payload(self._name(device), params)

    async def offer(self, device: str, update: Update) -> None:
        """Answer an offer: request its frames, or settle it at once.

        Raises:
            WireError: It is in the name of another device.
        """
        if update.device != device:
            raise WireError(f"update in the name of {update.device!r}", reason="identity")
        if update.start and update.start != self.starts[device]:
            self._answer(update, "late")  # trained before the round restarted
        elif device in self.accepted or device in self.failed:
            self._answer(update, "duplicate")
        elif device in self._storing:
            return  # its verdict follows
        elif update.failure is not None:
            self._drop(device)
            news = update.failure if update.failure not in self.failed.values() else "as devices before"
            log.warning("device %s failed round %d: %s", device, self.number, news)
            self.failed[device] = update.failure
            await self._settle(update, "accepted")
        else:
            try:
                with explain_disk_errors(self.path(device)):
                    await self._take(update)
            except Unwritable as error:
                self._handle_unwritable(device, error)
            except WireError as error:
                self._refuse(update, error)

    async def _take(self, update: Update) -> None:
        check_update(update, trains=update.params is not None if self.trains is None else self.trains)
        sums_inputs = self.expected[update.device].sums_inputs
        check_sums(update.sums, {*self.metrics, *(INPUT_NAMES if sums_inputs else ())})
        require_trained(update, self.expected[update.device])
        if update.params is None:
            self._store(Candidate(self._record(update, 0)))
        elif _has_content(update, update.params):
            frames.check_transfer(update.params, limit=self.limit)
            self._drop(update.device)  # frames of the same update
            self._store(
                Candidate(self._record(update, len(update.payload) + frames.HEADER_BYTES), content=update.payload)
            )
        else:
            await self._continue(self._begin(update, update.params))

    def _begin(self, update: Update, transfer: Transfer) -> Arrival:
        """Create the receiver of an update, or continue the one of a partly received update."""
        arrival = self._arrivals.get(update.device)
        if arrival and arrival.update.params == transfer:
            arrival.is_offline = False
            arrival.payload.note_waiting_sender(self.clock())
            return arrival
        frames.check_transfer(transfer, limit=self.limit)
        if arrival:
            self._arrivals.pop(update.device).payload.sink.close()
        path, policy, now = self.path(update.device), self._policy, self.clock()
        path.parent.mkdir(parents=True, exist_ok=True)
        pace = policy.pace(now, transfer.frame_bytes)
        pace.limit(self.ceilings.get(update.device))
        arrival = Arrival(update, Receiver(transfer, partial(FileSink, path), policy, pace, now))
        self._coming.set()
        return self._arrivals.setdefault(update.device, arrival)

    async def handle_reconnect(self, device: str) -> None:
        """Request everything missing from a device that has reconnected; frames in flight are lost."""
        if arrival := self._arrivals.get(device):
            arrival.is_offline = False
            arrival.payload.lost(self.clock())
            await self._ask(arrival)

    def handle_disconnect(self, device: str) -> None:
        """Release a disconnected device's share of the window."""
        if arrival := self._arrivals.get(device):
            arrival.is_offline = True

    def awaits(self, device: str) -> bool:
        """Return true if frames of a device are expected."""
        return device in self._arrivals

    async def frame(self, device: str, data: bytes) -> bool:
        """Take a frame of an offered update; return true if it held new or requested blocks.

        Raises:
            WireError: It is damaged or does not match the offer.
        """
        frame = frames.decode(data)
        arrival, is_expected = self._arrivals.get(device), self._expect(device).take(frame.data.nbytes)
        if arrival is None:
            return is_expected  # from a past round, or offered before a server restart
        try:
            with explain_disk_errors(self.path(device)):
                is_new = arrival.payload.take(frame, self.clock())
                await self._continue(arrival)
        except Unwritable as error:
            self._handle_unwritable(device, error)
            return True
        return is_new or is_expected

    def _expect(self, device: str) -> Allowance:
        """Return the account of what was requested from a device."""
        return self._expected.setdefault(device, self._policy.new_allowance())

    async def _continue(self, arrival: Arrival) -> None:
        """Store a complete update, which may be left from an earlier process; otherwise request more of it."""
        device = arrival.update.device
        if arrival.payload.complete:
            self._learn_ceiling(device, arrival)
            del self._arrivals[device]
            record = self._record(arrival.update, arrival.payload.bytes_received)
            self._store(Candidate(record, arrival))
        else:
            await self._ask(arrival)

    def _learn_ceiling(self, device: str, arrival: Arrival) -> None:
        """Remember the largest frame that passes for a device, and log it once."""
        ceiling = arrival.payload.pace.ceiling
        if ceiling is not None and ceiling != self.ceilings.get(device):
            log.warning("%s", describe_ceiling(f"device {device}", ceiling))
            self.ceilings[device] = ceiling

    async def _ask(self, arrival: Arrival) -> None:
        """Request the next frames, within the window that all devices share."""
        senders = sum(not other.is_offline for other in self._arrivals.values())
        if want := arrival.payload.want(self._policy.share(senders)):
            self._expect(arrival.update.device).ask(*want.ranges)
            await self._tell(arrival.update.device, want)

    async def watch(self) -> None:
        """Repeat requests for missing frames until cancelled; sleep while nothing is in flight."""
        while True:
            if not self._arrivals and not self._storing:
                self._coming.clear()
                await self._coming.wait()
            await asyncio.sleep(TICK_S)
            for storing in [task for task in self._storing.values() if task.done()]:
                storing.result()
            for arrival in list(self._arrivals.values()):
                if not arrival.payload.remaining_s(self.clock()):
                    arrival.payload.time_out(self.clock())
                    await self._ask(arrival)

    def _store(self, candidate: Candidate) -> None:
        device = candidate.record.device
        self._storing[device] = asyncio.create_task(self._finish(candidate), name=f"store-{device}")
        self._coming.set()

    async def _finish(self, candidate: Candidate) -> None:
        """Check and record a complete update, then acknowledge it."""
        record, arrival = candidate.record, candidate.arrival
        log_phase(log, "storing", run=self.run, round=self.number, device=record.device)
        try:
            if arrival:
                with explain_disk_errors(self.path(record.device)):
                    await self.worker(arrival.payload.sink.sync)
            await self._commit.add(candidate)
            if candidate.error:
                raise candidate.error
        except Unwritable as error:
            if arrival:
                arrival.payload.sink.close()
            self._handle_unwritable(record.device, error)
        except WireError as error:
            await self._handle_invalid(candidate, error)
        else:
            self.accepted[record.device] = record
            log_phase(log, "stored", run=self.run, round=self.number, device=record.device)
            await self._settle(record.update, "accepted")
        # Not after an unexpected error, which `watch` must raise; and its content may be arriving again already.
        if self._storing.get(record.device) is asyncio.current_task():
            del self._storing[record.device]

    async def _handle_invalid(self, candidate: Candidate, error: WireError) -> None:
        """Request an update that was damaged in transit again; refuse any other."""
        update, arrival = candidate.record.update, candidate.arrival
        if arrival is None:
            self._refuse(update, error)
        elif error.reason == "digest" and not arrival.payload.is_hopeless:
            self.refused["digest"] += 1
            log.warning("update of %s was damaged in transit, requesting it again", update.device)
            self._arrivals[update.device] = arrival
            self._coming.set()
            await self.handle_reconnect(update.device)
        else:
            arrival.payload.sink.remove()
            self._refuse(update, error)

    def _check_and_record(self, candidates: list[Candidate]) -> None:
        """Check complete updates one after the other, as each is mapped into memory, and record them together."""
        for candidate in candidates:
            try:
                self._check(candidate)
            except (Unwritable, WireError) as error:
                candidate.error = error
        self._record_together([candidate for candidate in candidates if candidate.error is None])

    def _record_together(self, candidates: list[Candidate]) -> None:
        """Record updates in one transaction; if that fails, one by one, since the fault may be of one alone."""
        if not candidates:
            return
        try:
            contents = {self._name(each.record.device): each.content for each in candidates if each.content}
            self.store.extend([candidate.record for candidate in candidates], contents)
        except (Unwritable, WireError) as error:
            if len(candidates) == 1:
                candidates[0].error = error
                return
            for candidate in candidates:
                self._record_together([candidate])

    def _check(self, candidate: Candidate) -> None:
        """Verify an update's parameters, if it has any, and remember their norm."""
        update, content = candidate.record.update, memoryview(bytearray(candidate.content))
        if update.params is None:
            return
        path = self.path(update.device)
        try:
            with explain_disk_errors(path):
                if candidate.arrival:
                    content = candidate.arrival.payload.finish()
                self.norms[update.device] = self.require(content, update)
        except FileNotFoundError as error:
            raise Unwritable(f"{path}: deleted while it was being received") from error

    def _handle_unwritable(self, device: str, error: Unwritable) -> None:
        """Drop an update that the disk rejects: the device keeps it and offers it again."""
        if not self.refused["disk"]:
            log.error("update of %s not stored, the device keeps it: %s", device, error)
        self.refused["disk"] += 1
        self.turned_away += 1
        self._drop(device)  # free the disk space of its partial file

    def _drop(self, device: str) -> None:
        if stale := self._arrivals.pop(device, None):
            with suppress(OSError):
                stale.payload.sink.remove()

    def _record(self, update: Update, size: int) -> UpdateAccepted:
        update = msgspec.structs.replace(update, payload=b"")  # stored beside the record
        return UpdateAccepted(round=self.number, device=update.device, update=update, bytes_up=size, at=self.clock())

    def _refuse(self, update: Update, error: WireError) -> None:
        self.refused[error.reason] += 1
        is_diverged = error.reason == "not-finite"  # from an older agent without its own check
        kind = f"{Diverged.__name__}: its update is" if is_diverged else ""
        self.failed[update.device] = f"{kind} refused: {error}".strip()
        self._drop(update.device)
        log.warning("refused the update of %s in round %d: %s", update.device, self.number, error)
        self._answers.tell(update.device, "ack", build_ack(update, "refused", str(error)))
        self.changed.set()

    def _answer(self, update: Update, verdict: Verdict) -> None:
        """Settle an update without a change of state; a device that misses this reply offers again."""
        self._answers.tell(update.device, "ack", build_ack(update, verdict))
        log_phase(log, verdict, run=self.run, round=self.number, device=update.device)

    async def _settle(self, update: Update, verdict: Verdict) -> None:
        await self._tell(update.device, build_ack(update, verdict))
        log_phase(log, verdict, run=self.run, round=self.number, device=update.device)
        self.changed.set()

    async def _tell(self, device: str, message: Message) -> None:
        """Send a message without waiting for the broker: a device that misses it offers again."""
        try:
            await self.transport.publish(topic(self.site, device, "ack"), wire.encode(message), assured=False)
        except Unreachable as error:
            log.debug("not sent, the device offers again: %s", error)

    async def close(self) -> None:
        """Finish stores in progress and drop incomplete updates."""
        await asyncio.gather(*self._storing.values())
        await self._answers.under_way.wait()
        for device in list(self._arrivals):
            self._drop(device)


def _has_content(update: Update, params: Transfer) -> bool:
    """Return true if an update contains its whole payload, undamaged; any other is requested in frames."""
    is_small = len(update.payload) == params.size <= INLINE_BYTES  # the store looks for larger ones in files
    return is_small and payload.digest([memoryview(update.payload)]) == params.digest
