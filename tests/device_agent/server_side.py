"""Test double of the server as devices see it, and a smart plug.

The plug answers over HTTP as a Shelly does, with watts that somebody else decides. Updates lie in an outbox as a
trainer leaves them; a split task has a server's half that is no network, but a gradient that follows from features.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from device_agent.exchange import outbox as files
from device_agent.exchange.download import Download
from device_agent.exchange.outbox import Outbox
from device_agent.exchange.upload import FIRST_PATIENCE_S, Delivery
from shared.protocol import payload, wire
from shared.protocol.messages import (
    BLOCK_BYTES,
    Ack,
    Assignment,
    Features,
    Gradient,
    Hyper,
    Missed,
    Skip,
    Spec,
    Status,
    Task,
    Transfer,
    Update,
    Want,
)
from shared.protocol.topics import topic
from shared.runtime.executor import background, inline
from shared.transfer import frames as chunks
from shared.transfer.in_memory import MemorySink
from shared.transfer.pace import Pace
from shared.transfer.receiver import Policy, Receiver, push_credit
from shared.transfer.sender import Sender
from shared.transport.base import Inbox
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
            await self.answer(offer)
        elif self.receiving and self.receiving.transfer.digest == offer.params.digest:
            self.receiving.note_new_offer(offer.pushed, self._now())
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
            await self.answer(self.offers[-1])
        await self._ask()

    async def answer(self, offer: Features) -> None:
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
                room=push_credit(self.pace, WINDOW),
            )
        )
        await self._send(frames)

    async def _ask(self) -> None:
        if self.receiving and (want := self.receiving.want()):
            await self.tell(want)

    async def _ask_again(self) -> None:
        if self.receiving and not self.receiving.remaining_s(self._now()):
            self.receiving.time_out(self._now())
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


@contextmanager
def plugged(watts: Callable[[], float]) -> Iterator[str]:
    """Answer while the block lasts; yields the address."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/rpc/Switch.GetStatus?id=0":
                self.send_error(404)
                return
            body = json.dumps({"id": 0, "output": True, "apower": watts()}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


DOWNLOAD_WINDOW, PATIENCE_S = 6, 2.0
MODEL = Random(5).randbytes(20 * 1024 - 100)
OTHER = Random(6).randbytes(3 * 1024)


@dataclass
class ModelServer:
    """The server's side: answers each frame asked for as `reply` says; the arguments are index and how often asked."""

    transport: MemoryTransport
    transfer: Transfer
    cut: Callable[[bytes, Transfer, int], bytes]
    data: bytes = MODEL
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
            for index, _ in chunks.pieces(want, self.transfer, BLOCK_BYTES):
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
    policy = Policy(DOWNLOAD_WINDOW, PATIENCE_S, limit)
    return Download(transport, SITE, DEVICE, folder, inline, clock, policy=policy)


BYTES = Random(3).randbytes(1 << 20)


def make(folder: Path, limit: int = files.LIMIT_BYTES) -> Outbox:
    return Outbox(folder / "outbox", folder / "state", limit)


def put(box: Outbox, number: int, data: bytes = BYTES, state: bytes = b"") -> None:
    """Commit an update as a trainer does."""
    draft = box.draft("trial", number)
    files.write_payload(draft, [memoryview(data)])
    if state:
        (draft / files.STATE).write_bytes(state)
    transfer = Transfer(digest=payload.digest([memoryview(data)]), size=len(data), frame_bytes=1024)
    files.write(draft, Update(run="trial", round=number, device="board", params=transfer))
    box.commit(draft)


STEPS = 4
ALGORITHM = Spec(name="fedsl", options={"period": STEPS, "drop": 0.3, "sparsity": 0.2})


def split(task: Task, **fields) -> Task:
    """Return a task as a split one."""
    hyper = Hyper(batch_size=8, learning_rate=0.1, local_epochs=STEPS)
    values = {"first_step": 0, "total_steps": 2 * STEPS}
    assignment = Assignment(seed=5, hyper=hyper, steps=STEPS, values=values)
    return msgspec.structs.replace(task, **({"algorithm": ALGORITHM, "assignment": assignment} | fields))


def below(folder: Path, parameters: bytes) -> str:
    """Write the part of the parameters below the cut as the download leaves it; return its path."""
    from shared.codecs.dense import dense  # noqa: PLC0415 - loads torch

    tree = dense().decode(payload.unpack(memoryview(bytearray(parameters)))).tree
    bottom = {key: leaf for key, leaf in tree.items() if key.startswith("1.")}
    path = folder / "params-below"
    path.write_bytes(b"".join(payload.pack(dense().encode(bottom, None)[0])))
    return str(path)


def answer(parts: Iterable[memoryview]) -> memoryview:
    """Return what the server sends down for what came up."""
    from shared.codecs.dense import dense  # noqa: PLC0415 - loads torch

    up = dense().decode(payload.unpack(memoryview(bytearray(b"".join(parts))))).tree
    down = {"gradient": up["features"].tanh(), "loss": up["features"].square().mean()}
    return memoryview(bytearray(b"".join(payload.pack(dense().encode(down, None)[0]))))


def finish(splitting: AbstractContextManager[Any]) -> int:
    """Drive a split training to its end in this process; return its steps."""
    count = 0
    with splitting as training:
        while training.up is not None:
            training.advance(answer(training.up))
            count += 1
    return count


@dataclass
class Exchanged:
    """The agent's exchange, answered here.

    Attributes:
        miss: Steps, by that at which this is said, that went on without the device.
    """

    miss: dict[int, int] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    bytes_so_far: tuple[int, int] = (0, 0)

    async def __call__(self, step: int, parts) -> memoryview | Missed:
        self.steps.append(step)
        if step in self.miss:
            return Missed(self.miss[step])
        came = answer(parts)
        up, down = self.bytes_so_far
        self.bytes_so_far = up + sum(part.nbytes for part in parts), down + came.nbytes
        return came


def payload_of(box: Outbox, number: int) -> bytes:
    """Return the bytes of the update of a round."""
    return next(entry for entry in box.entries() if entry.update.round == number).payload.read_bytes()
