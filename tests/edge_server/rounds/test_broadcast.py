"""Broadcast of a payload: complete at each device, sent once where possible."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import torch

from device_agent.exchange.download import Download
from edge_server.rounds import broadcast
from edge_server.rounds.broadcast import Outgoing
from shared.codecs.dense import dense
from shared.errors import Unreachable, WireError
from shared.protocol import wire
from shared.protocol.messages import Assignment, Hyper, Leave, Spec, Task, Want
from shared.protocol.payload import pack
from shared.protocol.topics import topic
from shared.runtime.executor import background, inline
from shared.transfer import frames
from shared.transfer.receiver import Policy
from shared.transfer.sender import Sender
from shared.transport.base import Transport
from shared.transport.memory import MemoryTransport
from shared.transport.simulated_link import Link, Rate
from tests.edge_server.harness import SITE

pytestmark = pytest.mark.virtual_time

FRAME_BYTES = 1024
FRAMES = 40
PAYLOAD = dense().encode({"weight": torch.arange(10_000, dtype=torch.float32)}, None)[0]
BYTES = b"".join(pack(PAYLOAD))
ONE_COPY = len(BYTES) + FRAMES * frames.HEADER_BYTES


@asynccontextmanager
async def sending(devices: list[str], broker: Transport, source: Transport | None = None) -> AsyncIterator[Outgoing]:
    """Serve PAYLOAD to devices while the block lasts, as the server does; `source` is the sender's own transport."""
    clock, sender = asyncio.get_running_loop().time, Sender.of_parts(pack(PAYLOAD), FRAME_BYTES)
    outgoing = Outgoing(SITE, source or broker, clock, devices, sender, patience_s=1.0)

    async def hear() -> None:
        async with broker.subscribe(topic(SITE, "+", "want")) as wants:
            async for name, data in wants:
                outgoing.want(name.split("/")[-2], wire.decode_as(Want, data))

    async with background(outgoing.run(), hear()):
        await asyncio.sleep(0)
        yield outgoing


def task_of(outgoing: Outgoing) -> Task:
    """Return a task that starts from what goes out."""
    some = Spec(name="x")
    return Task(
        run="run",
        round=1,
        device="",
        algorithm=some,
        model=some,
        codec=some,
        assignment=Assignment(seed=0, hyper=Hyper()),
        params=outgoing.transfer,
        shared=outgoing.is_shared,
        deadline_s=9.0,
    )


async def fetch(outgoing: Outgoing, device: str, transport: Transport, folder: Path) -> int:
    """Fetch as the agent does; return the bytes that came."""
    place = folder / device
    place.mkdir(exist_ok=True)
    clock = asyncio.get_running_loop().time
    download = Download(transport, SITE, device, place, inline, clock, policy=Policy(8, 3.0, 1 << 20))
    path, received = await download.fetch(task_of(outgoing))
    assert path.read_bytes() == BYTES
    return received


async def test_the_payload_passes_once_however_many_keep_up(tmp_path):
    """Server egress for ten devices is that for one, and each device hears just one copy."""
    broker, devices = MemoryTransport(), [f"d{number}" for number in range(10)]
    async with sending(devices, broker) as outgoing:
        received = await asyncio.gather(*(fetch(outgoing, device, broker, tmp_path) for device in devices))
        sent = outgoing.bytes_sent
    assert sent == ONE_COPY
    assert received == [ONE_COPY] * 10


async def test_a_single_device_is_served_on_its_own_topic(tmp_path):
    """Nobody else has to hear what concerns one device."""
    broker = MemoryTransport()
    async with broker.subscribe(topic(SITE, "_all", "model")) as common, sending(["d0"], broker) as outgoing:
        assert not outgoing.is_shared
        await fetch(outgoing, "d0", broker, tmp_path)
        assert not [*common.drain()]


async def test_a_slow_link_is_served_alone_and_keeps_nobody_waiting(tmp_path):
    """40 kB over 16 kbit/s take 20 s; the others are done after the patience, and it costs one copy more at most."""
    broker, loop = MemoryTransport(), asyncio.get_running_loop()
    slow = Link(broker, Rate(up_bits_per_second=16e3, down_bits_per_second=16e3), loop.time)
    async with (
        broker.subscribe(topic(SITE, "slow", "model")) as own,
        sending(["a", "b", "slow"], broker) as outgoing,
        asyncio.TaskGroup() as group,
    ):
        lagging = group.create_task(fetch(outgoing, "slow", slow, tmp_path))
        quick = [group.create_task(fetch(outgoing, device, broker, tmp_path)) for device in ("a", "b")]
        await asyncio.gather(*quick)
        soon = loop.time()
        await lagging
        heard = [data for _, data in own.drain()]
        told = [wire.decode_as(Leave, data) for data in heard if wire.is_message(data)]
        assert told == [Leave(digest=outgoing.transfer.digest)], "told once to leave the topic common to all"
        sent, late = outgoing.bytes_sent, loop.time()
    assert soon < 6
    assert 20 < late < 60
    assert ONE_COPY < sent < 2.6 * ONE_COPY


async def test_a_device_that_falls_silent_keeps_nobody_waiting_for_long(tmp_path):
    """Half through it asks for nothing more: after one patience the others go on without it."""
    broker, loop = MemoryTransport(), asyncio.get_running_loop()
    dying = Link(broker, Rate(down_bits_per_second=80e3), loop.time)
    async with sending(["a", "b", "dying"], broker) as outgoing:
        death = asyncio.create_task(fetch(outgoing, "dying", dying, tmp_path))
        others = [asyncio.create_task(fetch(outgoing, device, broker, tmp_path)) for device in ("a", "b")]
        await asyncio.sleep(2)
        assert not others[0].done()
        death.cancel()
        await asyncio.gather(*others)
        sent, now = outgoing.bytes_sent, loop.time()
    assert now < 6
    assert sent < 1.5 * ONE_COPY


async def test_a_device_that_goes_away_is_not_waited_for_at_all(tmp_path):
    """The server knows of its death and says so."""
    broker = MemoryTransport()
    async with sending(["a", "b", "dead"], broker) as outgoing:
        outgoing.dismiss("dead")
        await asyncio.gather(*(fetch(outgoing, device, broker, tmp_path) for device in ("a", "b")))
        assert asyncio.get_running_loop().time() == 0.0


async def test_a_device_that_comes_back_later_still_gets_everything(tmp_path):
    """It restarted after the others had finished, and hears its frames alone."""
    broker = MemoryTransport()
    async with sending(["a", "b", "late"], broker) as outgoing:
        outgoing.dismiss("late")
        await asyncio.gather(*(fetch(outgoing, device, broker, tmp_path) for device in ("a", "b")))
        first = outgoing.bytes_sent
        assert await fetch(outgoing, "late", broker, tmp_path) == ONE_COPY
        assert (first, outgoing.bytes_sent) == (ONE_COPY, 2 * ONE_COPY)


class Flaky:
    """A transport whose broker is away every third time."""

    def __init__(self, inner: Transport) -> None:
        self.inner, self.count = inner, 0
        self.subscribe = inner.subscribe
        self.max_payload_bytes = inner.max_payload_bytes

    async def publish(self, topic: str, payload: bytes, *, retain: bool = False, assured: bool = True) -> None:
        self.count += 1
        if self.count % 3 == 0:
            raise Unreachable("away")
        await self.inner.publish(topic, payload, retain=retain, assured=assured)


async def test_frames_that_the_broker_did_not_take_are_sent_when_asked_for_again(tmp_path):
    """A broker that comes and goes costs time and nothing else."""
    broker = MemoryTransport()
    async with sending(["a", "b"], broker, source=Flaky(broker)) as outgoing:
        await asyncio.gather(*(fetch(outgoing, device, broker, tmp_path) for device in ("a", "b")))


@pytest.mark.parametrize("others", [[], ["good"]])
async def test_who_asks_without_end_is_sent_a_few_copies_and_then_little(monkeypatch, others):
    """A thousand wishes a second for the largest frame were a thousand frames, on the line that all share."""
    monkeypatch.setattr(broadcast, "MORE_BYTES", 0.0)
    monkeypatch.setattr(broadcast, "MORE_PER_S", len(BYTES) / 10.0)
    broker = MemoryTransport()
    async with sending(["greedy", *others], broker) as outgoing:
        wish = Want(digest=outgoing.digest, frame_bytes=FRAME_BYTES, ranges=[(0, 8)])
        for _ in range(10_000):
            outgoing.want("greedy", wish)
            await asyncio.sleep(0.001)
        at_once = outgoing.bytes_sent
        await asyncio.sleep(20.0)
        outgoing.want("greedy", wish)
        await asyncio.sleep(0.1)
        later = outgoing.bytes_sent
    assert at_once <= (broadcast.COPIES + 1) * ONE_COPY + 8 * FRAME_BYTES
    assert later > at_once


async def test_nonsense_wants_are_refused_and_strangers_ignored():
    """Frames that do not exist are an error of the asker; who is no part of the audience gets nothing."""
    broker = MemoryTransport()
    async with sending(["a"], broker) as outgoing:
        digest = outgoing.transfer.digest
        for ranges in ([(0, FRAMES + 1)], [(-1, 2)], [(3, 3)], [(5, 2)]):
            with pytest.raises(WireError) as refused:
                outgoing.want("a", Want(digest=digest, frame_bytes=FRAME_BYTES, ranges=ranges))
            assert refused.value.reason == "shape"
        outgoing.want("stranger", Want(digest=digest, frame_bytes=FRAME_BYTES, ranges=[(0, FRAMES)]))
        await asyncio.sleep(5)
        assert outgoing.bytes_sent == 0


def test_a_payload_is_described_by_its_content():
    """Size and digest are those of the bytes that the frames add up to, cut from the tensors in place."""
    sender = Sender.of_parts(pack(PAYLOAD), FRAME_BYTES)
    transfer = sender.transfer
    assert (transfer.size, transfer.blocks) == (len(BYTES), FRAMES)
    assert b"".join(sender.source.read(0, transfer.size)) == BYTES
    other = dense().encode({"weight": torch.arange(10_000, dtype=torch.float32) + 1}, None)[0]
    parts = pack(other)
    digest = Sender.of_parts(parts, 2048).transfer.digest
    assert Sender.of_parts(parts, FRAME_BYTES).transfer == msgspec.structs.replace(transfer, digest=digest)
    assert digest != transfer.digest


def want_of(outgoing: Outgoing, ranges: list[tuple[int, int]], frame_bytes: int) -> Want:
    return Want(digest=outgoing.digest, frame_bytes=frame_bytes, ranges=ranges)


@pytest.mark.parametrize("ranges", [[(0, 2), (1, 3)], [(2, 3), (0, 1)], [(0, 1)] * 3, [(n, n + 1) for n in range(65)]])
async def test_wishes_that_no_receiver_has(ranges):
    """That overlap, go backwards, or are more than anybody has under way."""
    async with sending(["a"], MemoryTransport()) as outgoing:
        transfer = msgspec.structs.replace(outgoing.transfer, size=1 << 20)
        with pytest.raises(WireError):
            frames.pieces(want_of(outgoing, ranges, FRAME_BYTES), transfer, FRAME_BYTES)
