"""Send each device its gradient of a split step, kept until its next, as it is asked for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

from edge_server.rounds.split.device_session import DeviceSession
from shared.errors import Unreachable
from shared.protocol import wire
from shared.protocol.messages import Features, Gradient, Room, Want
from shared.protocol.topics import topic
from shared.transfer.pace import Pace
from shared.transfer.receiver import room
from shared.transport.base import Transport

log = logging.getLogger(__name__)

MOST_WANTS = 16
"""Of one device that wait to be sent, pushes among them; a receiver has half as many under way, and asks again."""


@dataclass
class GradientsOut:
    """Sends the gradients that lie in the sessions of one round's devices."""

    site: str
    transport: Transport
    _frames: asyncio.Queue[tuple[DeviceSession, Iterator[bytes]]] = field(default_factory=asyncio.Queue)

    async def announce(self, session: DeviceSession, offer: Features, pace: Pace, window: int) -> None:
        """Announce a device's gradient, and send at once what it has room for.

        Args:
            session: Of the device; if it has no gradient, nothing is sent: the one for its offer is being computed.
            offer: The features that it answers.
            pace: Of what comes from the device.
            window: Frames that it may have under way.
        """
        gradient = session.gradient
        if gradient is None:
            return
        unasked = offer.room if session.queued < MOST_WANTS else Room()
        pushed, frames = gradient.push(unasked, self.transport.max_payload_bytes)
        header = Gradient(
            run=offer.run,
            round=offer.round,
            device=session.device,
            start=offer.start,
            step=offer.step,
            answers=offer.params.digest,
            params=gradient.transfer,
            pushed=pushed,
            room=room(pace, window),
        )
        announcing = self.transport.publish(topic(self.site, session.device, "gradient"), wire.encode(header))
        ended, _ = await asyncio.gather(
            announcing, self._push(session, frames), return_exceptions=True
        )  # in this order
        if isinstance(ended, Unreachable):
            log.debug("not announced, %s will offer again: %s", session.device, ended)
        elif ended is not None:
            raise ended

    async def _push(self, session: DeviceSession, frames: Iterator[bytes]) -> None:
        """Queue frames right behind the header, without waiting until the broker has acknowledged that."""
        self._queue(session, frames)

    def answer(self, session: DeviceSession, want: Want) -> None:
        """Send what a device asks for.

        Raises:
            WireError: It asks for what does not exist.
        """
        gradient = session.gradient
        if gradient and gradient.transfer.digest == want.digest and session.queued < MOST_WANTS:
            self._queue(session, gradient.answer(want, self.transport.max_payload_bytes))

    def _queue(self, session: DeviceSession, frames: Iterator[bytes]) -> None:
        session.queued += 1
        self._frames.put_nowait((session, frames))

    async def send(self) -> None:
        """Send the frames that are due, one device's after the other's, until cancelled."""
        while True:
            session, frames = await self._frames.get()
            session.queued -= 1
            try:
                for frame in frames:
                    await self.transport.publish(topic(self.site, session.device, "gradient"), frame, assured=False)
            except Unreachable as error:
                log.debug("frames for %s not sent, they will be asked for again: %s", session.device, error)
