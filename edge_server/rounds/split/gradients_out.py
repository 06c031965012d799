"""Send each device its gradient of a split step, as it is asked for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from edge_server.rounds.broadcast import WishBudget
from edge_server.rounds.split.device_session import DeviceSession
from shared.errors import Unreachable
from shared.protocol import wire
from shared.protocol.messages import BLOCK_BYTES, Features, Gradient, Want
from shared.protocol.topics import topic
from shared.runtime.clock import Clock, monotonic
from shared.transfer.pace import Pace
from shared.transfer.receiver import room
from shared.transfer.sender import Sender
from shared.transport.base import Transport

log = logging.getLogger(__name__)


@dataclass
class GradientsOut:
    """Sends the gradients that lie in the sessions of one round's devices."""

    site: str
    transport: Transport
    clock: Clock = monotonic
    _budgets: dict[str, tuple[bytes, WishBudget]] = field(default_factory=dict)
    _turns: asyncio.Queue[DeviceSession] = field(default_factory=asyncio.Queue)

    async def announce(self, session: DeviceSession, offer: Features, pace: Pace, window: int) -> None:
        """Announce a device's gradient, and send at once what it has room for.

        Args:
            session: Of the device; if it has no gradient of that step, nothing is sent: it is being computed.
            offer: The features that it answers.
            pace: Of what comes from the device.
            window: Frames that it may have under way.
        """
        gradient = session.answers.of_step(offer.step)
        if gradient is None:
            return
        session.send(gradient)
        pieces = [] if session.waiting else gradient.unasked(offer.room, self.transport.max_payload_bytes)
        if not self._may_send(session.device, gradient, pieces):
            pieces = []
        header = Gradient(
            run=offer.run,
            round=offer.round,
            device=session.device,
            start=offer.start,
            step=offer.step,
            answers=offer.params.digest,
            params=gradient.transfer,
            pushed=pieces[-1][1] if pieces else 0,
            room=room(pace, window),
        )
        announcing = self.transport.publish(topic(self.site, session.device, "gradient"), wire.encode(header))
        ended, _ = await asyncio.gather(
            announcing, self._push(session, pieces), return_exceptions=True
        )  # in this order
        if isinstance(ended, Unreachable):
            log.debug("not announced, %s will offer again: %s", session.device, ended)
        elif ended is not None:
            raise ended

    async def _push(self, session: DeviceSession, pieces: Sequence[tuple[int, int]]) -> None:
        """Queue frames right behind the header, without waiting until the broker has acknowledged that."""
        self._queue(session, pieces)

    def answer(self, session: DeviceSession, want: Want) -> None:
        """Send what a device asks for: at most a window of it waits at once, nothing of it twice, and so many bytes.

        Raises:
            WireError: It asks for what does not exist.
        """
        gradient = session.gradient
        if gradient and gradient.transfer.digest == want.digest:
            pieces = gradient.pieces(want, self.transport.max_payload_bytes)
            if self._may_send(session.device, gradient, pieces):
                self._queue(session, pieces)

    def _may_send(self, device: str, gradient: Sender, pieces: Sequence[tuple[int, int]]) -> bool:
        """Count what a device asks for of its gradients; tell whether that is no more than anybody needs."""
        now, digest = self.clock(), gradient.transfer.digest
        known, budget = self._budgets.get(device, (b"", WishBudget(now)))
        if known != digest:
            budget.begin(gradient.transfer.size, now)
            self._budgets[device] = digest, budget
        return budget.take(sum(stop - start for start, stop in pieces) * BLOCK_BYTES, now)

    def _queue(self, session: DeviceSession, pieces: Sequence[tuple[int, int]]) -> None:
        if pieces and not session.waiting:
            self._turns.put_nowait(session)
        for start, stop in pieces:
            session.waiting.add(start, stop)

    async def send(self) -> None:
        """Send the frames that are due, a frame of each device in turn, until cancelled."""
        while True:
            session = await self._turns.get()
            start = next(iter(session.waiting), None)
            if start is None or session.gradient is None:
                continue  # that step is over
            frame = session.gradient.frame(start, session.waiting.pop(start))
            if session.waiting:
                self._turns.put_nowait(session)
            try:
                await self.transport.publish(topic(self.site, session.device, "gradient"), frame, assured=False)
            except Unreachable as error:
                log.debug("a frame for %s not sent, it will be asked for again: %s", session.device, error)
