"""Device report publisher: periodic measurements, and task costs after each upload."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from device_agent.exchange.upload_meter import CompletedUpload
from device_agent.measurement.power_log import PowerLog, charge_energy
from shared.errors import Unreachable
from shared.protocol import wire
from shared.protocol.measurements import Cost, TaskCost
from shared.protocol.messages import Report
from shared.protocol.topics import topic
from shared.runtime import backports
from shared.runtime.clock import Clock
from shared.runtime.executor import Worker
from shared.transport.base import Transport

log = logging.getLogger(__name__)

Charge: TypeAlias = Callable[[Cost, str, float, float], Cost]

MIN_PAUSE_S = 1.0
"""Minimum pause between two reports, however short the rounds are."""
SHORTEST_S = 0.001
"""Tolerance for a timer that fires early."""
MAX_EARLIER_COSTS = 32
"""Most costs of earlier tasks in one report; the last ones are retained."""


@dataclass
class Reporter:
    """Publishes reports; the broker retains the last one.

    Attributes:
        sense: Reads the board; may block.
        report_s: Seconds between two reads of the board.
        power: Samples the board's power; None without a power source.
        instance: Instance of this process's Status.
        charge: Adds the joules between two moments to a field of a cost; None to use the power log.
        published: Set when the broker accepted a report.
    """

    transport: Transport
    site: str
    device: str
    clock: Clock
    worker: Worker
    sense: Callable[[], Report]
    report_s: float
    power: PowerLog | None = None
    instance: str = ""
    charge: Charge | None = None
    published: asyncio.Event = field(default_factory=asyncio.Event)
    _last_cost: TaskCost | None = None
    _is_reported: bool = False
    _earlier: deque[TaskCost] = field(default_factory=lambda: deque(maxlen=MAX_EARLIER_COSTS))
    _uploaded: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            report = await self.worker(self.sense)
            await self._send(report, self.clock() + self.report_s)

    def note_upload_start(self) -> None:
        """Raise the sampling rate of power for an upload."""
        if self.power:
            self.power.hurry()

    def note_upload(self, sent: CompletedUpload) -> None:
        """Record the cost of an acknowledged update."""
        cost = msgspec.structs.replace(sent.cost, upload_s=sent.ended - sent.started, bytes_up=sent.bytes_up)
        cost = self.add_energy(cost, "upload_joules", sent.started, sent.ended)
        if self._last_cost and not self._is_reported:
            self._earlier.append(self._last_cost)
        self._last_cost, self._is_reported = TaskCost(run=sent.run, round=sent.round, cost=cost), False
        self._uploaded.set()

    def add_energy(self, cost: Cost, figure: str, start: float, stop: float) -> Cost:
        """Return a cost with the joules of a transfer added, if they are known.

        Args:
            figure: Field to add to: `download_joules` or `upload_joules`.
            start, stop: Seconds by the agent's clock.
        """
        if self.charge:
            return self.charge(cost, figure, start, stop)
        return charge_energy(cost, figure, self.power, start, stop) if self.power else cost

    async def _send(self, report: Report, due: float) -> None:
        """Publish a report; again for every acknowledged update until the next one is due, and until it arrives."""
        while True:
            self._uploaded.clear()
            is_published = await self._publish(report)
            await asyncio.sleep(min(MIN_PAUSE_S, max(0.0, due - self.clock())))
            left_s = due - self.clock()
            if left_s < SHORTEST_S or (is_published and not await self._wait_for_upload(left_s)):
                return

    async def _wait_for_upload(self, seconds: float) -> bool:
        try:
            async with backports.timeout(seconds):
                return await self._uploaded.wait()
        except TimeoutError:
            return False

    async def _publish(self, report: Report) -> bool:
        earlier = list(self._earlier)
        message = msgspec.structs.replace(
            report, at=self.clock(), spent=self._last_cost, earlier=earlier, instance=self.instance
        )
        try:
            await self.transport.publish(topic(self.site, self.device, "report"), wire.encode(message), retain=True)
        except Unreachable as error:
            log.debug("no report: %s", error)
            return False
        self.published.set()
        self._is_reported = self._last_cost is message.spent
        self._earlier = deque(
            [task_cost for task_cost in self._earlier if task_cost not in earlier], maxlen=MAX_EARLIER_COSTS
        )
        return True
