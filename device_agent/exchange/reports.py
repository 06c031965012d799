"""Tell the server what the board measures, from time to time, and what an update cost, at once."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from device_agent.exchange.upload import Sent
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
"""Between two reports: rounds may be faster than anybody wants to read what they cost."""
SHORTEST_S = 0.001
"""A timer may fire so much too early."""
MAX_EARLIER = 32
"""Tasks settled between two reports whose cost is told; of more, the last."""


@dataclass
class Reporter:
    """Sends reports; the last one stays with the broker.

    Attributes:
        sense: Reads the board; may block.
        report_s: Seconds between looks at the board.
        power: Samples the board's power, where something tells it.
        instance: That of this process's Status.
        charge: Adds the joules between two moments to a cost, as the figure of that name; None: as the power log knows.
        heard: Set once the broker took a report.
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
    heard: asyncio.Event = field(default_factory=asyncio.Event)
    _spent: TaskCost | None = None
    _told: bool = False
    _earlier: deque[TaskCost] = field(default_factory=lambda: deque(maxlen=MAX_EARLIER))
    _settled: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Report for ever."""
        while True:
            report = await self.worker(self.sense)
            await self._tell(report, self.clock() + self.report_s)

    def sending(self) -> None:
        """Take note that an update is on its way."""
        if self.power:
            self.power.hurry()

    def settled(self, sent: Sent) -> None:
        """Take down what an update cost that the server has just settled."""
        cost = msgspec.structs.replace(sent.cost, upload_s=sent.ended - sent.started, bytes_up=sent.bytes_up)
        cost = self.charged(cost, "upload_joules", sent.started, sent.ended)
        if self._spent and not self._told:
            self._earlier.append(self._spent)
        self._spent, self._told = TaskCost(run=sent.run, round=sent.round, cost=cost), False
        self._settled.set()

    def charged(self, cost: Cost, figure: str, start: float, stop: float) -> Cost:
        """Return a cost with the joules between two moments as one of its figures, if anything tells them.

        Args:
            cost: Of a task so far.
            figure: `download_joules` or `upload_joules`.
            start: Second at which the transfer began.
            stop: Second at which it ended.
        """
        if self.charge:
            return self.charge(cost, figure, start, stop)
        return charge_energy(cost, figure, self.power, start, stop)

    async def _tell(self, report: Report, due: float) -> None:
        """Send a report; again with every update that is settled until it is due anew, and until it is heard."""
        while True:
            self._settled.clear()
            heard = await self._said(report)
            await asyncio.sleep(min(MIN_PAUSE_S, max(0.0, due - self.clock())))
            left_s = due - self.clock()
            if left_s < SHORTEST_S or (heard and not await self._settled_within(left_s)):
                return

    async def _settled_within(self, seconds: float) -> bool:
        try:
            async with backports.timeout(seconds):
                return await self._settled.wait()
        except TimeoutError:
            return False

    async def _said(self, report: Report) -> bool:
        earlier = list(self._earlier)
        told = msgspec.structs.replace(
            report, at=self.clock(), spent=self._spent, earlier=earlier, instance=self.instance
        )
        try:
            await self.transport.publish(topic(self.site, self.device, "report"), wire.encode(told), retain=True)
        except Unreachable as error:
            log.debug("no report: %s", error)
            return False
        self.heard.set()
        self._told = self._spent is told.spent
        self._earlier = deque([one for one in self._earlier if one not in earlier], maxlen=MAX_EARLIER)
        return True
