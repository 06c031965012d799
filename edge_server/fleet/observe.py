"""Record device presence and relevant readings in a run's journal, in batches.

The site's own history has every report for some days (`edge_server.fleet.history`); a trace of the run needs only this.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from edge_server.fleet.record_limiter import RecordLimiter
from edge_server.fleet.report_changes import ObservedDevice, filter_report
from edge_server.fleet.state import Fleet
from edge_server.journal.claims import MAX_SOURCE
from edge_server.journal.records import AnyRecord, Joined, Left, select
from shared.errors import Unwritable
from shared.protocol.messages import Report, Status
from shared.runtime.clock import Clock

log = logging.getLogger(__name__)
BATCH_S = 1.0
"""At most one write a second, and one before a round opens; a killed server loses what is not written yet."""

MOST = 10_000
"""Most records that wait for the disk; more are lost, and logged once."""

GRACE_S = 10.0
"""Seconds after a server's restart until devices without a message count as disconnected meanwhile."""


RETRY_S, SETTLE_S = 3.0, 5.0
"""Seconds until a full disk is tried again, and most seconds that a round waits for the records."""


def _join_cause(before: str | None, instance: str) -> Literal["connected", "reconnected", "restarted"]:
    if before is None:
        return "connected"
    return "reconnected" if before == instance else "restarted"


@dataclass
class Observer:
    """Turns statuses and reports of the fleet into journal records.

    Attributes:
        pending: Records that wait for the disk.
    """

    clock: Clock
    extend: Callable[[Sequence[AnyRecord]], Awaitable[None]]
    _online: set[str] = field(default_factory=set)
    _unheard: set[str] = field(default_factory=set)
    _begun_s: float = 0.0
    _is_full: bool = False
    _instances: dict[str, str] = field(default_factory=dict)
    _last: dict[str, ObservedDevice] = field(default_factory=dict)
    _allowance: RecordLimiter = field(default_factory=RecordLimiter)
    pending: asyncio.Queue[AnyRecord] = field(default_factory=asyncio.Queue)
    _hurry: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self, records: Sequence[AnyRecord], fleet: Fleet) -> None:
        """Continue a journal with the current state of the fleet.

        The journal does not name the agent processes that an earlier server process saw, so after a restart of the
        server every device is recorded as `connected` again.
        """
        for record in select(records, Joined, Left):
            if isinstance(record, Joined):
                self._unheard.add(record.device)
            elif isinstance(record, Left):
                self._unheard.discard(record.device)
        self._begun_s = self.clock()
        for _, status in sorted(fleet.statuses.items()):
            self.record_status(status)
        for _, report in sorted(fleet.reports.items()):
            self.record_report(report)

    def record_status(self, status: Status) -> None:
        """Record a birth or a death."""
        device, at, before = status.device, self.clock(), self._instances.get(status.device)
        self._record_missing(at)
        if not self._allowance.take(device, at):
            return
        if status.online:
            self._unheard.discard(device)
            self._online.add(device)
            self._instances[device] = status.instance
            cause = _join_cause(before, status.instance)
            self._put(Joined(device=device, at=at, cause=cause, version=status.version[:MAX_SOURCE]))
        elif device in self._online:
            self._online.remove(device)
            self._put(Left(device=device, at=at))

    def _record_missing(self, at: float) -> None:
        """Record devices that disconnected while the server was down."""
        if at - self._begun_s < GRACE_S:
            return
        for device in sorted(self._unheard):
            self._put(Left(device=device, at=at, cause="unheard"))
        self._unheard.clear()

    def record_report(self, report: Report) -> None:
        """Record a report if it differs enough from the last one."""
        at = self.clock()
        self._record_missing(at)
        if (news := filter_report(report, self._last.get(report.device), at)) and self._allowance.take(
            report.device, at
        ):
            record, self._last[report.device] = news
            self._put(record)

    def _put(self, record: AnyRecord) -> None:
        if self.pending.qsize() < MOST:
            self.pending.put_nowait(record)
        elif not self._is_full:
            log.warning("device records are lost to the run's journal until its disk has room again")
        self._is_full = self.pending.qsize() >= MOST

    async def write_batches(self) -> None:
        """Write records until cancelled."""
        while True:
            batch = [await self.pending.get()]
            try:
                async with asyncio.timeout(BATCH_S):
                    await self._hurry.wait()
            except TimeoutError:
                pass
            while not self.pending.empty():
                batch.append(self.pending.get_nowait())
            await self._write(batch)
            for _ in batch:
                self.pending.task_done()

    async def _write(self, batch: list[AnyRecord]) -> None:
        while True:
            try:
                await self.extend(batch)
            except Unwritable as error:
                log.debug("device records wait for the disk: %s", error)
                await asyncio.sleep(RETRY_S)
            else:
                return

    async def flush(self) -> None:
        """Wait until pending records are written, but not long if the disk is full."""
        self._record_missing(self.clock())
        self._hurry.set()
        try:
            async with asyncio.timeout(SETTLE_S):
                await self.pending.join()
        except TimeoutError:
            log.debug("%d device records wait for the disk", self.pending.qsize())
        self._hurry.clear()
