"""Batched writer of device reports into the site's history.

Writes run off the event loop, and their failure never stops a run.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from edge_server.journal.report_history import ReportHistory, StoredReport
from edge_server.plan.server_config import ServerConfig
from shared.errors import CorruptFile, Unwritable
from shared.protocol.messages import Report
from shared.runtime.clock import utc_seconds
from shared.runtime.executor import Worker, background

log = logging.getLogger(__name__)

BATCH_S = 5.0
"""Seconds between batches; only a device's last report of each batch is stored."""

MAX_DEVICES = 1024


@dataclass
class HistoryWriter:
    """Stores reports in batches.

    Attributes:
        calendar: Calendar seconds, since the history is read after restarts.
    """

    readings: ReportHistory
    worker: Worker
    calendar: Callable[[], float] = utc_seconds
    _batch: dict[str, StoredReport] = field(default_factory=dict)
    _refused: bool = False

    def hear(self, report: Report) -> None:
        """Add a report to the next batch."""
        if self.readings.keep_days and (report.device in self._batch or len(self._batch) < MAX_DEVICES):
            self._batch[report.device] = StoredReport(self.calendar(), report)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Write batches during the block, and the rest after it."""
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
        """Write the batch; if that fails, drop it and log the error once."""
        batch, self._batch = self._batch, {}
        if not batch:
            return
        try:
            await self.worker(self.readings.write, list(batch.values()))
        except (Unwritable, CorruptFile, sqlite3.Error) as error:
            if not self._refused:
                log.warning("reports are not stored, runs continue: %s", error)
            self._refused = True
        else:
            if self._refused:
                log.info("reports are stored again")
            self._refused = False


def open_history(config: ServerConfig, worker: Worker) -> HistoryWriter:
    """Return the history writer of a server's site; with `keep_days` 0 it stores nothing."""
    readings = config.readings
    return HistoryWriter(ReportHistory(Path(config.data_dir), readings.keep_days, readings.max_mb << 20), worker)
