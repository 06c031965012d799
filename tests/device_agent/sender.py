"""The server's side of a download, and the download of one device from it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from device_agent.exchange.download import Download
from shared.protocol import wire
from shared.protocol.messages import BLOCK_BYTES, Transfer, Want
from shared.protocol.topics import topic
from shared.runtime.executor import background, inline
from shared.transfer import frames
from shared.transfer.receiver import Policy
from shared.transport.base import Inbox
from shared.transport.memory import MemoryTransport

SITE, DEVICE, WINDOW, PATIENCE_S = "lab", "board", 6, 2.0
DATA = Random(5).randbytes(20 * 1024 - 100)
OTHER = Random(6).randbytes(3 * 1024)


@dataclass
class Sender:
    """The server's side: answers each frame asked for as `reply` says; the arguments are index and how often asked."""

    transport: MemoryTransport
    transfer: Transfer
    cut: Callable[[bytes, Transfer, int], bytes]
    data: bytes = DATA
    reply: Callable[[bytes, int, int], bytes | None] = lambda frame, _index, _asked: frame
    pause_s: float = 0.0
    receiver: str = DEVICE
    asked: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    sent: int = 0
    most_under_way: int = 0

    async def run(self) -> None:
        async with self.transport.subscribe(topic(SITE, DEVICE, "want")) as inbox:
            waiting: asyncio.Queue[int] = asyncio.Queue()
            async with background(self._listen(inbox, waiting)):
                while True:
                    await self._send(await waiting.get())

    async def _listen(self, inbox: Inbox, waiting: asyncio.Queue[int]) -> None:
        async for _, data in inbox:
            want = wire.decode_as(Want, data)
            assert want.digest == self.transfer.digest
            for index, _ in frames.pieces(want, self.transfer, BLOCK_BYTES):
                self.asked.append(index)
                waiting.put_nowait(index)
            self.times.append(asyncio.get_running_loop().time())
            self.most_under_way = max(self.most_under_way, len(self.asked) - self.sent)

    async def _send(self, index: int) -> None:
        await asyncio.sleep(self.pause_s)
        self.sent += 1
        frame = self.reply(self.cut(self.data, self.transfer, index), index, self.asked.count(index))
        if frame is not None:
            await self.transport.publish(topic(SITE, self.receiver, "model"), frame)


def download(transport: MemoryTransport, folder: Path, limit: int = 1 << 20) -> Download:
    clock = asyncio.get_running_loop().time
    policy = Policy(WINDOW, PATIENCE_S, limit)
    return Download(transport, SITE, DEVICE, folder, inline, clock, policy=policy)
