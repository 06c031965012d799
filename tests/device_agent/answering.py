"""A server of split sessions as a device knows it: takes features, answers with gradients, forgets when told to."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from shared.protocol import wire
from shared.protocol.messages import Features, Gradient, Skip, Task, Want
from shared.protocol.topics import topic
from shared.transfer import frames as chunks
from shared.transfer.in_memory import MemorySink
from shared.transfer.pace import Pace
from shared.transfer.receiver import Policy, Receiver, room
from shared.transfer.sender import Sender
from shared.transport.memory import MemoryTransport

SITE, DEVICE = "lab", "board"
LIMIT, WINDOW, FRAME_BYTES = 1 << 22, 16, 16 * 1024
POLICY = Policy(WINDOW, 2.0, LIMIT, frame_bytes=FRAME_BYTES)
TICK_S = 0.05


def features(step: int, size: int = 100_000) -> bytes:
    return Random(step).randbytes(size)


def gradient(step: int) -> bytes:
    return Random(-step).randbytes(60_000)


@dataclass
class Server:
    """Answers every step with its gradient; what it must not answer it is told."""

    transport: MemoryTransport
    answers: Callable[[int], bytes] = gradient
    silent: bool = False
    came: list[bytes] = field(default_factory=list)
    offers: list[Features] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)
    heard: Counter[str] = field(default_factory=Counter)
    down: Sender | None = None
    receiving: Receiver[MemorySink] | None = None
    pace: Pace | None = None

    async def run(self) -> None:
        self.pace = POLICY.pace(self._now())
        async with self.transport.subscribe(topic(SITE, DEVICE, "features")) as inbox:
            while True:
                try:
                    async with asyncio.timeout(TICK_S):
                        _, data = await anext(inbox)
                except TimeoutError:
                    await self._ask_again()
                else:
                    await self._hear(data)

    async def _hear(self, data: bytes) -> None:
        if chunks.is_frame(data):
            self.heard["frame"] += 1
            return await self._take(data)
        message = wire.decode(data)
        self.heard[type(message).__name__] += 1
        if isinstance(message, Want) and self.down and message.digest == self.down.transfer.digest:
            await self._send(self.down.answer(message, self.transport.max_payload_bytes))
        elif isinstance(message, Features):
            self.offers.append(message)
            self.moments.append(self._now())
            if not self.silent:
                await self._offered(message)
        return None

    async def _offered(self, offer: Features) -> None:
        if len(self.came) >= offer.step:
            await self._answer(offer)
        elif self.receiving and self.receiving.transfer.digest == offer.params.digest:
            self.receiving.offered_again(offer.pushed, self._now())
        else:
            now, pushed = self._now(), offer.pushed
            self.receiving = Receiver(offer.params, MemorySink, POLICY, self.pace, now, pushed=pushed)
        await self._ask()

    async def _take(self, data: bytes) -> None:
        frame = chunks.decode(data)
        if self.receiving is None or frame.digest != self.receiving.transfer.digest:
            return
        self.receiving.take(frame, self._now())
        if self.receiving.complete:
            self.came.append(bytes(self.receiving.finish()))
            self.receiving = None
            await self._answer(self.offers[-1])
        await self._ask()

    async def _answer(self, offer: Features) -> None:
        self.down = Sender.of_parts([memoryview(self.answers(offer.step))], FRAME_BYTES)
        pushed, frames = self.down.push(offer.room, self.transport.max_payload_bytes)
        await self.tell(
            Gradient(
                run=offer.run,
                round=offer.round,
                device=offer.device,
                start=offer.start,
                step=offer.step,
                answers=offer.params.digest,
                params=self.down.transfer,
                pushed=pushed,
                room=room(self.pace, WINDOW),
            )
        )
        await self._send(frames)

    async def _ask(self) -> None:
        if self.receiving and (want := self.receiving.want()):
            await self.tell(want)

    async def _ask_again(self) -> None:
        if self.receiving and not self.receiving.left_s(self._now()):
            self.receiving.gave_up(self._now())
            await self._ask()

    async def _send(self, frames) -> None:
        for frame in frames:
            await self.transport.publish(topic(SITE, DEVICE, "gradient"), frame, assured=False)

    async def tell(self, message) -> None:
        await self.transport.publish(topic(SITE, DEVICE, "gradient"), wire.encode(message))

    def skip(self, task: Task, offered: int, step: int) -> Skip:
        about = {"run": task.run, "round": task.round, "device": DEVICE, "start": task.params.digest}
        return Skip(**about, offered=offered, step=step)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
