"""Device exchanges under hostile messages: upload, download, split steps.

What a receiver and a sender make of frames is in `test_hostile`; here those who own them read a topic on which somebody
else speaks. Every second is virtual.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device_agent.exchange.outbox import Outbox
from device_agent.exchange.split_session import SplitSessions
from device_agent.exchange.upload import Delivery
from device_agent.exchange.upload_meter import UploadMeter
from shared.errors import SessionLost
from shared.protocol import wire
from shared.protocol.messages import (
    Ack,
    Assignment,
    Gradient,
    Hyper,
    Leave,
    Missed,
    Skip,
    Spec,
    Task,
    Transfer,
    Update,
    Want,
)
from shared.protocol.topics import topic
from shared.runtime.clock import VirtualLoop
from shared.runtime.executor import background
from shared.transfer import frames
from shared.transfer.in_memory import MemorySink
from shared.transfer.receiver import Receiver
from shared.transfer.sender import Sender
from shared.transport.memory import MemoryTransport
from tests.device_agent import server_side
from tests.device_agent.server_side import (
    DATA,
    DEVICE,
    FRAME_BYTES,
    MODEL,
    OTHER,
    POLICY,
    SITE,
    Desk,
    ModelServer,
    Server,
    ack,
    features,
    gradient,
)
from tests.fuzz.trees import cut_and_spliced
from tests.fuzz.wires import mutate

UP, DOWN, STRANGE = (Sender.of_parts([memoryview(data)], 1024) for data in (DATA, MODEL, OTHER))
STEPS = range(1, 5)
ABOUT = {"run": "trial", "round": 1, "device": DEVICE, "start": bytes(16)}
SPEC = Spec(name="dense")

Words = Callable[[list[bytes]], Iterator[bytes]]
"""What somebody else says, given what an honest peer might."""


def task(params: Transfer) -> Task:
    told = Assignment(seed=1, hyper=Hyper(), steps=len(STEPS))
    specs = {"algorithm": SPEC, "model": SPEC, "codec": SPEC}
    return Task(
        run="trial", round=1, device=DEVICE, **specs, assignment=told, params=params, shared=False, deadline_s=9
    )


async def speak(transport: MemoryTransport, channel: str, words: Iterator[bytes]) -> None:
    """Say one word after the other, mostly as often as anybody else gets to speak."""
    for number, data in enumerate(words):
        await transport.publish(topic(SITE, DEVICE, channel), data)
        await asyncio.sleep(0.01 if number % 10 == 9 else 0.0)


async def upload(folder: Path, words: Words, *, may_end: bool = False) -> object:
    """Bring an update from the outbox to a server that asks for it; return the bytes of frames that this took."""
    transport, box, clock = MemoryTransport(), Outbox(folder / "outbox", folder / "state"), loop_time()
    desk = Desk(transport, box, Delivery(transport, SITE, DEVICE, box, Random(1), uploads=UploadMeter(clock)))
    desk.put(1, DATA, UP.transfer)
    honest = [
        wire.encode(Want(digest=UP.transfer.digest, frame_bytes=1024, ranges=[(0, 2), (4, 5)])),
        wire.encode(Ack(run="other", round=1, device=DEVICE, verdict="accepted")),
        UP.frame(0, 1),
    ]
    receiver = Receiver(UP.transfer, MemorySink, POLICY, POLICY.pace(clock()), clock())
    async with (
        transport.subscribe(topic(SITE, DEVICE, "update")) as inbox,
        background(desk.delivery.run(), speak(transport, "ack", words(honest))),
    ):
        while not receiver.complete:
            with suppress(TimeoutError):
                async with asyncio.timeout(receiver.remaining_s(clock())):
                    _, data = await anext(inbox)
                    if frames.is_frame(data):
                        receiver.take(frames.decode(data), clock())
            if not receiver.remaining_s(clock()):
                receiver.time_out(clock())
            if want := receiver.want():
                await desk.tell(want, pause_s=0.0)
        assert receiver.finish() == DATA
        await desk.tell(ack(1))
        assert box.entries() == []
        return desk.delivery.uploads.bytes_sent


async def download(folder: Path, words: Words, *, may_end: bool = False) -> object:
    """Fetch a model into a file; return the bytes that came for it."""
    transport = MemoryTransport()
    server = ModelServer(transport, DOWN.transfer, lambda _data, _transfer, index: DOWN.frame(index, index + 1))
    honest = [DOWN.frame(3, 4), STRANGE.frame(0, 1), wire.encode(Leave(digest=STRANGE.transfer.digest))]
    async with background(server.run(), speak(transport, "model", words(honest))):
        await asyncio.sleep(0)  # let the server subscribe
        path, received = await server_side.download(transport, folder).fetch(task(DOWN.transfer))
        assert path.read_bytes() == MODEL
        return received


async def split(_folder: Path, words: Words, *, may_end: bool = False) -> object:
    """Do the steps of a session, each of which brings its gradient, or may be lost; return the bytes up and down."""
    transport, clock = MemoryTransport(), loop_time()
    server, splitting = Server(transport), SplitSessions(transport, SITE, DEVICE, clock, POLICY, Random(1))
    down = Sender.of_parts([memoryview(gradient(1))], FRAME_BYTES)
    answers = Sender.of_parts([memoryview(features(1))], FRAME_BYTES).transfer.digest
    honest = [
        wire.encode(Skip(**ABOUT, offered=1, step=2)),
        wire.encode(Gradient(**ABOUT, step=1, answers=answers, params=down.transfer, pushed=3)),
        wire.encode(Want(digest=answers, frame_bytes=FRAME_BYTES, ranges=[(0, 9)])),
        down.frame(0, 1),
    ]
    session = splitting.session(task(Transfer(digest=ABOUT["start"], size=1, frame_bytes=1024)))
    async with background(server.run(), speak(transport, "gradient", words(honest))), session as exchange:
        for step in STEPS:
            with suppress(*[SessionLost] * may_end):
                came = await exchange(step, [memoryview(features(step))])
                assert came == gradient(step) or (may_end and isinstance(came, Missed))
        return exchange.bytes_so_far


def loop_time() -> Callable[[], float]:
    return asyncio.get_running_loop().time


def virtually(routine: Coroutine[Any, Any, object]) -> object:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(asyncio.wait_for(routine, 3600))


EXCHANGES = [upload, download, split]


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_whatever_comes_on_its_topic_an_exchange_brings_all_or_ends_as_it_may(tmp_path_factory, exchange) -> None:
    """Damaged words and frames, some of the right payload, between the right ones: no error but a lost session."""

    @settings(max_examples=30, deadline=None)
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        random = Random(seed)

        def words(honest: list[bytes]) -> Iterator[bytes]:
            while True:
                data = random.choice(honest)
                yield mutate(data, random) if wire.is_message(data) else cut_and_spliced(data, random)

        virtually(exchange(tmp_path_factory.mktemp("device"), words, may_end=True))

    check()


def asked(*ranges: tuple[int, int], digest: bytes = UP.transfer.digest, frame_bytes: int = 1024) -> bytes:
    return wire.encode(Want(digest=digest, frame_bytes=frame_bytes, ranges=list(ranges)))


WORTHLESS = {
    "nothing": b"",
    "text": b"hello",
    "another version": b"FM\x09",
    "a message cut": b"FM\x01\xc1",
    "a message without fields": b"FM\x01\x80",
    "another kind": wire.encode(Update(run="r", round=1, device="x", params=None)),
    "huge": bytes(2 << 20),
    "noise": b"\xff" * 50,
    "the magic of a frame": b"FC",
    "a frame of another payload": STRANGE.frame(0, 1),
    "a frame of another version": UP.frame(0, 1)[:2] + b"\x09" + UP.frame(0, 1)[3:],
    "a frame with a changed bit": UP.frame(0, 1)[:-1] + bytes([UP.frame(0, 1)[-1] ^ 1]),
    "a frame cut short": DOWN.frame(0, 1)[:100],
    "a frame of another count": frames.encode(STRANGE.transfer, 0, [memoryview(bytes(1024))]),
    "nothing asked for": asked(),
    "an unknown digest": asked((0, 1), digest=bytes(16)),
    "blocks beyond the end": asked((0, 7)),
    "blocks that begin beyond the end": asked((6, 7)),
    "no blocks": asked((3, 3)),
    "blocks backwards": asked((4, 2)),
    "blocks before the first": asked((-1, 2)),
    "frames of no size": asked((5, 1), digest=b"x" * 16, frame_bytes=3),
    "an acknowledgement of nothing here": wire.encode(ack(7)),
}


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("word", WORTHLESS)
def test_what_says_nothing_costs_nothing(tmp_path, exchange, word) -> None:
    """Said again and again, before, between and behind the right ones: not a byte more goes either way."""
    undisturbed, disturbed = (tmp_path / name for name in ("undisturbed", "disturbed"))
    for folder in (undisturbed, disturbed):
        folder.mkdir()
    usual = virtually(exchange(undisturbed, lambda _honest: iter(())))
    assert virtually(exchange(disturbed, lambda _honest: repeat(WORTHLESS[word]))) == usual
