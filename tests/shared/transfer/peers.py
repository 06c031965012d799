"""Two servers that exchange a payload: one offers it and answers, the other asks until it has it in a file.

    python -m tests.shared.transfer.peers offer|fetch PORT FILE

In a process of its own over a real broker, or both in one loop of virtual time.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from shared.errors import Unreachable
from shared.protocol import wire
from shared.protocol.messages import Ack, Update, Want
from shared.protocol.topics import topic
from shared.transfer import frames
from shared.transfer.receiver import Policy, Receiver
from shared.transfer.sender import Sender
from shared.transfer.to_file import FileSink, view
from shared.transport.base import Broker, Inbox, Transport
from shared.transport.mqtt import MqttTransport
from shared.transport.simulated_link import Link, Rate

REGION, NORTH = "region", "north"
FRAME_BYTES, OFFER_S, RATE = 32 * 1024, 1.0, 8e6
POLICY = Policy(window=8, patience_s=1.0, limit=64 << 20, frame_bytes=FRAME_BYTES)
UP, DOWN = topic(REGION, NORTH, "update"), topic(REGION, NORTH, "ack")


async def offer(transport: Transport, path: Path) -> int:
    """Offer a file until it is acknowledged; return the bytes of frames that it took."""
    sender, sent = Sender.of_parts([view(path)], FRAME_BYTES), 0
    update = Update(run="region", round=1, device=NORTH, params=sender.transfer)
    async with transport.subscribe(DOWN) as inbox:
        while True:
            await _publish(transport, wire.encode(update))
            while (data := await _next(inbox, OFFER_S)) is not None:
                match wire.decode(data):
                    case Ack():
                        return sent
                    case Want() as want if want.digest == sender.transfer.digest:
                        for frame in sender.answer(want, transport.max_payload_bytes):
                            await _publish(transport, frame)
                            sent += len(frame)


async def fetch(transport: Transport, path: Path, clock: Callable[[], float]) -> Receiver[FileSink]:
    """Receive what is offered into a file, acknowledge it, and return its receiver."""
    receiver: Receiver[FileSink] | None = None
    async with transport.subscribe(UP) as inbox:
        while receiver is None or not receiver.complete:
            data = await _next(inbox, receiver.left_s(clock()) if receiver else None)
            if data is None:
                receiver.gave_up(clock())
            elif frames.is_frame(data):
                if receiver:
                    receiver.take(frames.decode(data), clock())
            elif receiver is None:
                transfer, now = wire.decode_as(Update, data).params, clock()
                pace = POLICY.pace(now, transfer.frame_bytes)
                receiver = Receiver(transfer, partial(FileSink, path), POLICY, pace, now)
            if want := receiver and receiver.want():
                await _publish(transport, wire.encode(want), DOWN)
        receiver.finish()
        ack = Ack(run="region", round=1, device=NORTH, verdict="accepted")
        await transport.publish(DOWN, wire.encode(ack))
    return receiver


async def _publish(transport: Transport, data: bytes, name: str = UP) -> None:
    try:
        await transport.publish(name, data, assured=False)
    except Unreachable:
        await asyncio.sleep(OFFER_S)


async def _next(inbox: Inbox, seconds: float | None) -> bytes | None:
    """Return the next message; None after so many seconds without one."""
    try:
        async with asyncio.timeout(seconds):
            return (await anext(inbox))[1]
    except TimeoutError:
        return None


async def main(role: str, port: str, path: str) -> None:
    """Do one side's part over a broker."""
    async with MqttTransport(Broker(port=int(port)), f"{REGION}-{role}").running() as transport:
        await transport.connected.wait()
        if role == "offer":
            await offer(transport, Path(path))
        else:
            clock = asyncio.get_running_loop().time
            link = Link(transport, Rate(RATE, RATE), clock)  # slow enough to be killed on the way
            link.connected.set()
            await fetch(link, Path(path), clock)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
