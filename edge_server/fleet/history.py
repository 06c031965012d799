"""Reports on their way into the site's history: in batches, off the event loop, and never at a run's expense."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from edge_server.journal.report_history import KeptReport, ReportHistory
from edge_server.plan.server_config import ServerConfig
from shared.errors import CorruptFile, Unwritable
from shared.protocol.messages import Report
from shared.runtime.clock import utc_seconds
from shared.runtime.executor import Worker, background

log = logging.getLogger(__name__)

BATCH_S = 5.0
"""From one batch to the next; of a device that reports more often, the last report of each batch is kept."""

MAX_DEVICES = 1024


@dataclass
class History:
    """Keeps what is heard.

    Attributes:
        calendar: Calendar seconds; what is kept is read after restarts, so that no monotonic clock serves.
    """

    readings: ReportHistory
    worker: Worker
    calendar: Callable[[], float] = utc_seconds
    _batch: dict[str, KeptReport] = field(default_factory=dict)
    _refused: bool = False

    def hear(self, report: Report) -> None:
        """Keep a report with the next batch."""
        if self.readings.keep_days and (report.device in self._batch or len(self._batch) < MAX_DEVICES):
            self._batch[report.device] = KeptReport(self.calendar(), report)

    @asynccontextmanager
    async def keeping(self) -> AsyncIterator[None]:
        """Write batches while the block lasts, and the rest after it."""
        try:
            async with background(self._keep()):
                yield
        finally:
            await self.write()
            self.readings.close()

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(BATCH_S)
            await self.write()

    async def write(self) -> None:
        """Write what was heard; what the disk refuses is dropped, and said once."""
        batch, self._batch = self._batch, {}
        if not batch:
            return
        try:
            await self.worker(self.readings.write, list(batch.values()))
        except (Unwritable, CorruptFile, sqlite3.Error) as error:
            if not self._refused:
                log.warning("reports are not kept, runs go on: %s", error)
            self._refused = True
        else:
            if self._refused:
                log.info("reports are kept again")
            self._refused = False


def history_of(config: ServerConfig, worker: Worker) -> History:
    """Return the history of a server's site; one that keeps 0 days keeps nothing."""
    readings = config.readings
    return History(ReportHistory(Path(config.data_dir), readings.keep_days, readings.max_mb << 20), worker)
