"""What of a split step goes down: each device's last gradient, kept until its next, and sent as it is asked for."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from shared.errors import Unreachable
from shared.protocol import wire
from shared.protocol.messages import Features, Gradient, Room, Want
from shared.protocol.topics import topic
from shared.transfer.pace import Pace
from shared.transfer.receiver import room
from shared.transfer.sender import Sender
from shared.transport.base import Transport

log = logging.getLogger(__name__)

MOST_WANTS = 16
"""Of one device that wait to be sent, pushes among them; a receiver has half as many under way, and asks again."""


@dataclass
class Gradients:
    """The gradients of one round's devices.

    Attributes:
        here: By device; nothing while a step is being computed.
    """

    site: str
    transport: Transport
    here: dict[str, Sender] = field(default_factory=dict)
    _frames: asyncio.Queue[tuple[str, Iterator[bytes]]] = field(default_factory=asyncio.Queue)
    _waiting: Counter[str] = field(default_factory=Counter)

    def forget(self, devices: Iterable[str]) -> None:
        """Part with what was computed of an earlier step: who is at this one has it."""
        for device in devices:
            self.here.pop(device, None)

    async def tell(self, device: str, offer: Features, pace: Pace, window: int) -> None:
        """Say that a device's gradient is here, and send at once what it has room for.

        Args:
            device: Whose; if it has none, nothing is said: the one that belongs to its offer is being computed.
            offer: The features that it answers.
            pace: Of what comes from the device.
            window: Frames that it may have under way.
        """
        gradient = self.here.get(device)
        if gradient is None:
            return
        unasked = offer.room if self._waiting[device] < MOST_WANTS else Room()
        pushed, frames = gradient.push(unasked, self.transport.max_payload_bytes)
        header = Gradient(
            run=offer.run,
            round=offer.round,
            device=device,
            start=offer.start,
            step=offer.step,
            answers=offer.params.digest,
            params=gradient.transfer,
            pushed=pushed,
            room=room(pace, window),
        )
        telling = self.transport.publish(topic(self.site, device, "gradient"), wire.encode(header))
        told, _ = await asyncio.gather(telling, self._push(device, frames), return_exceptions=True)  # in this order
        if isinstance(told, Unreachable):
            log.debug("not told, %s will offer again: %s", device, told)
        elif told is not None:
            raise told

    async def _push(self, device: str, frames: Iterator[bytes]) -> None:
        """Send frames right behind the header, without waiting for the broker's word that it has that."""
        self._send(device, frames)

    def want(self, device: str, want: Want) -> None:
        """Send what a device asks for.

        Raises:
            WireError: It asks for what does not exist.
        """
        gradient = self.here.get(device)
        if gradient and gradient.transfer.digest == want.digest and self._waiting[device] < MOST_WANTS:
            self._send(device, gradient.answer(want, self.transport.max_payload_bytes))

    def _send(self, device: str, frames: Iterator[bytes]) -> None:
        self._waiting[device] += 1
        self._frames.put_nowait((device, frames))

    async def send(self) -> None:
        """Send the frames that are due, one device's after the other's, until cancelled."""
        while True:
            device, frames = await self._frames.get()
            self._waiting[device] -= 1
            try:
                for frame in frames:
                    await self.transport.publish(topic(self.site, device, "gradient"), frame, assured=False)
            except Unreachable as error:
                log.debug("frames for %s not sent, they will be asked for again: %s", device, error)
