"""Round-robin queue of gradient frames within each device's byte budget."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from edge_server.rounds.broadcast import add_payload, make_request_budget
from edge_server.rounds.split.device_session import DeviceSession
from shared.errors import Unreachable
from shared.protocol.messages import BLOCK_BYTES
from shared.protocol.topics import topic
from shared.runtime.clock import Clock
from shared.runtime.token_bucket import TokenBucket
from shared.transfer.sender import Sender
from shared.transport.base import Transport

log = logging.getLogger(__name__)


@dataclass
class GradientQueue:
    """Gradient frames to send during one round; the pending pieces belong to the sessions."""

    site: str
    transport: Transport
    clock: Clock
    _budgets: dict[str, tuple[bytes, TokenBucket]] = field(default_factory=dict)
    _turns: asyncio.Queue[DeviceSession] = field(default_factory=asyncio.Queue)

    def put(self, session: DeviceSession, pieces: Sequence[tuple[int, int]]) -> None:
        """Queue pieces of a session's gradient."""
        if pieces and not session.pending:
            self._turns.put_nowait(session)
        for start, stop in pieces:
            session.pending.add(start, stop)

    async def push(self, session: DeviceSession, pieces: Sequence[tuple[int, int]]) -> None:
        """Queue frames behind the header, without waiting for the broker to acknowledge it."""
        self.put(session, pieces)

    def may_send(self, device: str, gradient: Sender, pieces: Sequence[tuple[int, int]]) -> bool:
        """Charge requested pieces to the device's budget; return false if they exceed it."""
        now, digest = self.clock(), gradient.transfer.digest
        budget_digest, budget = self._budgets.get(device, (b"", make_request_budget(now)))
        if budget_digest != digest:
            add_payload(budget, gradient.transfer.size, now)
            self._budgets[device] = digest, budget
        return budget.take(sum(stop - start for start, stop in pieces) * BLOCK_BYTES, now)

    async def run(self) -> None:
        """Send queued frames, one of each device in turn, until cancelled."""
        while True:
            session = await self._turns.get()
            start = next(iter(session.pending), None)
            if start is None or session.gradient is None:
                continue  # the step has closed
            frame = session.gradient.frame(start, session.pending.pop(start))
            if session.pending:
                self._turns.put_nowait(session)
            try:
                await self.transport.publish(topic(self.site, session.device, "gradient"), frame, assured=False)
            except Unreachable as error:
                log.debug("frame for %s not sent, the device requests it again: %s", session.device, error)
