"""A device's outbox and delivery, and the server's ear beside them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random

from device_agent.exchange import outbox as files
from device_agent.exchange.outbox import Outbox
from device_agent.exchange.upload import FIRST_PATIENCE_S, Delivery
from shared.protocol import wire
from shared.protocol.messages import Ack, Status, Transfer, Update, Want
from shared.protocol.topics import topic
from shared.runtime.executor import background
from shared.transfer import frames as chunks
from shared.transport.base import Inbox
from shared.transport.memory import MemoryTransport

SITE, DEVICE = "lab", "board"
DATA = Random(9).randbytes(5 * 1024 + 17)
PAST_JITTER_S = 1.5 * FIRST_PATIENCE_S


@dataclass
class Desk:
    """Speaks as the server, and notes what the device says and when."""

    transport: MemoryTransport
    outbox: Outbox
    delivery: Delivery
    offers: list[Update] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)
    frames: list[int] = field(default_factory=list)

    def put(self, number: int, data: bytes, transfer: Transfer) -> None:
        """Commit an update as a trainer does."""
        draft = self.outbox.draft("trial", number)
        (draft / files.PAYLOAD).write_bytes(data)
        files.write(draft, Update(run="trial", round=number, device=DEVICE, params=transfer))
        self.outbox.commit(draft)

    async def tell(self, message: Ack | Want | Status, pause_s: float = 0.1) -> None:
        """Say something as the server, and let the device act on it."""
        receiver, channel = ("_server", "status") if isinstance(message, Status) else (DEVICE, "ack")
        await self.transport.publish(topic(SITE, receiver, channel), wire.encode(message))
        await asyncio.sleep(pause_s)

    async def listen(self, inbox: Inbox) -> None:
        async for _, data in inbox:
            if wire.is_message(data):
                self.offers.append(wire.decode_as(Update, data))
                self.moments.append(asyncio.get_running_loop().time())
            else:
                frame = chunks.decode(data)
                assert frame.data == DATA[frame.start * 1024 : (frame.start + 1) * 1024]
                self.frames.append(frame.start)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with (
            self.transport.subscribe(topic(SITE, DEVICE, "update")) as inbox,
            background(self.listen(inbox), self.delivery.run()),
        ):
            await asyncio.sleep(0.1)
            yield

    @property
    def rounds(self) -> list[int]:
        return [update.round for update in self.offers]


def ack(number: int, verdict: str = "accepted", reason: str = "") -> Ack:
    return Ack(run="trial", round=number, device=DEVICE, verdict=verdict, reason=reason)
