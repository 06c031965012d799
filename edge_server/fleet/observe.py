"""What a run's journal keeps of its devices' words besides their updates: who came and went, readings that matter.

The site's own history has every report for days (`edge_server.fleet.history`); this is what a trace of the run needs.

How much of a run's journal a device may cause: a bucket of words for each, filled slowly.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from edge_server.fleet.state import Fleet
from edge_server.journal.claims import MAX_SOURCE
from edge_server.journal.records import AnyRecord, Joined, Left, Sensed
from edge_server.journal.report_rows import AT_ONCE_S
from shared.errors import Unwritable
from shared.protocol.measurements import Provenance
from shared.protocol.messages import Report, Status
from shared.runtime.clock import Clock

BURST, WORDS_PER_S = 600.0, 0.5
"""Records that a device may cause at once, and for ever: 10 MB a day, whatever it says."""

log = logging.getLogger(__name__)
BATCH_S = 1.0
"""One write a second at most, and one before a round opens; a server that is killed loses what it heard since."""

MOST = 10_000
"""Records that wait for the disk; more are lost, which the log says."""

GRACE_S = 10.0
"""After a server's restart, for a broker to say who is there; who is not heard of by then has left meanwhile."""

PAUSE_S = 5.0
"""Between two tellings of one device for no more than that a figure moved."""

TOLERANCE: Mapping[str, float] = {
    "cpu.f_hertz": 0.05,
    "power.total_watts": 0.05,
    "thermal.hottest_celsius": 0.05,
    "throttle.now_flag": 0.0,
    "throttle.undervoltage_flag": 0.0,
    "throttle.overcurrent_count": 0.0,
    "link.up_bits_per_s": 0.05,
    "link.down_bits_per_s": 0.05,
    "memory.available_bytes": 0.1,
    "memory.swap_used_bytes": 0.1,
    "gpu.load_ratio": 0.25,
    "gpu.f_hertz": 0.05,
    "gpu.rail_watts": 0.05,
    "gpu.hottest_celsius": 0.05,
}
"""The readings that are told, and the share by which one must have moved to be news."""

FACTS = ("model", "mode", "governor", "kernel", "l4t", "torch", "onnxruntime", "throttle")
MAX_FACT = 160


@dataclass
class Allowance:
    """Buckets by device; who says too much is told of once, and is then heard in part.

    Attributes:
        burst: Records that a device may cause at once.
        per_s: The same for ever.
        what: Takes them, for the log.
    """

    burst: float = BURST
    per_s: float = WORDS_PER_S
    what: str = "a run's journal"
    _left: dict[str, tuple[float, float]] = field(default_factory=dict)
    _talkative: set[str] = field(default_factory=set)

    def take(self, device: str, at: float) -> bool:
        """Tell whether a device may cause a record at this moment; if so, it is counted."""
        left, since = self._left.get(device, (self.burst, at))
        left = min(self.burst, left + self.per_s * (at - since))
        may = left >= 1
        if not may and device not in self._talkative:
            self._talkative.add(device)
            log.warning("device %s says more than %s takes; some of it is left out", device, self.what)
        self._left[device] = (left - may, at)
        return may


RETRY_S, SETTLE_S = 3.0, 5.0
"""A full disk is tried again, and no round waits for longer than that: it has records of its own to wait for."""


@dataclass(frozen=True)
class ObservedDevice:
    """What the journal says of a device so far: all of its last `Sensed` and the facts and sources before."""

    at: float
    readings: Mapping[str, float]
    provenance: Mapping[str, Provenance]
    board: str
    facts: Mapping[str, str]
    spent: tuple[str, int] | None


def sense_report(report: Report, told: ObservedDevice | None, at: float) -> tuple[Sensed, ObservedDevice] | None:
    """Return what to record of a report, and what is told then; None where nothing of it is news.

    News are: a first report, the end of a task, a flag, a fact or a lack that changed; and, after a pause, a figure
    that moved beyond its tolerance. What cannot be true is left out.

    Args:
        report: A device's newest.
        told: What the journal has of it; None for nothing.
        at: The server's clock, in seconds.
    """
    figures = {name: report.readings[name] for name in TOLERANCE if name in report.readings}
    figures = {name: one for name, one in figures.items() if math.isfinite(one.value) and math.isfinite(one.at)}
    readings = {name: one.value for name, one in figures.items() if one.value >= 0 or name.endswith("_celsius")}
    sources = {
        name: Provenance(source=figures[name].source[:MAX_SOURCE], quality=figures[name].quality) for name in readings
    }
    facts = {name: report.facts[name][:MAX_FACT] for name in FACTS if name in report.facts}
    spent = (report.spent.run, report.spent.round) if report.spent else None
    now = ObservedDevice(at, readings, sources, report.board[:MAX_SOURCE], facts, spent)
    if not readings and not facts and not now.board:
        return None
    if told and not _is_news(told, now):
        return None
    ages = {name: report.at - figures[name].at for name in readings}
    return _record(report.device, told, now, ages), now


def _is_news(told: ObservedDevice, now: ObservedDevice) -> bool:
    if (told.readings.keys(), told.facts, told.board, told.spent) != (
        now.readings.keys(),
        now.facts,
        now.board,
        now.spent,
    ):
        return True
    moved = {name for name, value in now.readings.items() if _has_moved(name, told.readings[name], value)}
    return any(not TOLERANCE[name] for name in moved) or (bool(moved) and now.at - told.at >= PAUSE_S)


def _has_moved(name: str, before: float, value: float) -> bool:
    return abs(value - before) > TOLERANCE[name] * abs(before)


def _record(device: str, told: ObservedDevice | None, now: ObservedDevice, ages: Mapping[str, float]) -> Sensed:
    known = told or ObservedDevice(now.at, {}, {}, "", {}, None)
    return Sensed(
        device=device,
        at=now.at,
        readings=dict(now.readings),
        ages={name: age for name, age in ages.items() if AT_ONCE_S < age < math.inf},
        provenance={name: one for name, one in now.provenance.items() if known.provenance.get(name) != one},
        board=now.board if now.board != known.board else "",
        facts={name: fact for name, fact in now.facts.items() if known.facts.get(name) != fact},
    )


def _cause(before: str | None, instance: str) -> Literal["connected", "reconnected", "restarted"]:
    if before is None:
        return "connected"
    return "reconnected" if before == instance else "restarted"


@dataclass
class Observing:
    """Takes what is heard of the fleet into a run's journal, in batches.

    Attributes:
        waiting: Records that wait for the disk.
    """

    clock: Clock
    extend: Callable[[Sequence[AnyRecord]], Awaitable[None]]
    _here: set[str] = field(default_factory=set)
    _unheard: set[str] = field(default_factory=set)
    _begun_s: float = 0.0
    _is_full: bool = False
    _known: dict[str, str] = field(default_factory=dict)
    _told: dict[str, ObservedDevice] = field(default_factory=dict)
    _allowance: Allowance = field(default_factory=Allowance)
    waiting: asyncio.Queue[AnyRecord] = field(default_factory=asyncio.Queue)
    _hurry: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self, records: Iterable[AnyRecord], fleet: Fleet) -> None:
        """Go on from a journal, with all that the fleet says of itself now.

        Which process of a device an earlier server process had heard is not recorded; after a restart of the server
        every device `connected` again.
        """
        for record in records:
            if isinstance(record, Joined):
                self._unheard.add(record.device)
            elif isinstance(record, Left):
                self._unheard.discard(record.device)
        self._begun_s = self.clock()
        for _, status in sorted(fleet.statuses.items()):
            self.presence(status)
        for _, report in sorted(fleet.reports.items()):
            self.report(report)

    def presence(self, status: Status) -> None:
        """Take a birth or a death."""
        device, at, before = status.device, self.clock(), self._known.get(status.device)
        self._give_up_if_late(at)
        if not self._allowance.take(device, at):
            return
        if status.online:
            self._unheard.discard(device)
            self._here.add(device)
            self._known[device] = status.instance
            cause = _cause(before, status.instance)
            self._put(Joined(device=device, at=at, cause=cause, version=status.version[:MAX_SOURCE]))
        elif device in self._here:
            self._here.remove(device)
            self._put(Left(device=device, at=at))

    def _give_up_if_late(self, at: float) -> None:
        """Tell who was there when the server went away, and was not when it came back."""
        if at - self._begun_s < GRACE_S:
            return
        for device in sorted(self._unheard):
            self._put(Left(device=device, at=at, cause="unheard"))
        self._unheard.clear()

    def report(self, report: Report) -> None:
        """Take a report, where it is news."""
        at = self.clock()
        self._give_up_if_late(at)
        if (found := sense_report(report, self._told.get(report.device), at)) and self._allowance.take(
            report.device, at
        ):
            record, self._told[report.device] = found
            self._put(record)

    def _put(self, record: AnyRecord) -> None:
        if self.waiting.qsize() < MOST:
            self.waiting.put_nowait(record)
        elif not self._is_full:
            log.warning("what devices say is lost to the run's journal until its disk takes something again")
        self._is_full = self.waiting.qsize() >= MOST

    async def keep(self) -> None:
        """Record what is heard, until cancelled."""
        while True:
            batch = [await self.waiting.get()]
            try:
                async with asyncio.timeout(BATCH_S):
                    await self._hurry.wait()
            except TimeoutError:
                pass
            while not self.waiting.empty():
                batch.append(self.waiting.get_nowait())
            await self._write(batch)
            for _ in batch:
                self.waiting.task_done()

    async def _write(self, batch: list[AnyRecord]) -> None:
        while True:
            try:
                await self.extend(batch)
            except Unwritable as error:
                log.debug("what devices say waits for the disk: %s", error)
                await asyncio.sleep(RETRY_S)
            else:
                return

    async def settled(self) -> None:
        """Wait until all that was heard is recorded; where the disk is full, not for long."""
        self._give_up_if_late(self.clock())
        self._hurry.set()
        try:
            async with asyncio.timeout(SETTLE_S):
                await self.waiting.join()
        except TimeoutError:
            log.debug("%d words of devices wait for the disk", self.waiting.qsize())
        self._hurry.clear()
