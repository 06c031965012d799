"""Flooding or invalid member of a split session: the others continue."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from edge_server.fleet.answers import BURST
from edge_server.plan.server_config import LinkConfig
from edge_server.rounds.broadcast import COPIES, MORE_BYTES, MORE_PER_S
from edge_server.rounds.split.device_session import PATIENCE, DeviceSession
from edge_server.rounds.split.payloads import StepPayloads
from shared.protocol import wire
from shared.protocol.messages import BLOCK_BYTES, Features, Gradient, Transfer, Want
from shared.protocol.topics import topic
from shared.runtime.executor import background
from shared.transfer import frames
from shared.transfer.sender import Sender
from shared.transport.memory import MemoryTransport
from tests.edge_server.harness import SITE
from tests.edge_server.rounds.split.test_session import Device, features, two

pytestmark = [pytest.mark.usefixtures("plain_split"), pytest.mark.virtual_time]

ANSWER_S = 0.01
STEPS, DEADLINE_S = 60, 2.0
LONG = {
    "algorithm": f'name = "plain-split"\noptions = {{ steps = {STEPS} }}',
    "round": f"deadline_s = 200.0\nstep_deadline_s = {DEADLINE_S}",
}
PER_S = 10_000


class Confirming(MemoryTransport):
    """A broker that takes its time to confirm what it has, as one behind a network does."""

    async def publish(self, topic: str, payload: bytes, *, retain: bool = False, assured: bool = True) -> None:
        """Publish, and wait for the confirmation of what is assured; devices do not wait."""
        await super().publish(topic, payload, retain=retain, assured=assured)
        if assured and topic.rsplit("/", 1)[-1] in ("gradient", "ack"):
            await asyncio.sleep(ANSWER_S)


def nonsense(device: Device) -> list[bytes | Features | Want]:
    """Return what a member may say that is of no use: of other steps, in other names, huge, damaged, twice."""
    data = features(1)
    huge = Transfer(digest=bytes(16), size=1 << 30, frame_bytes=1024)
    return [
        *(device.offer(step, data) for step in (1, 2, STEPS, STEPS + 1, 0, -1, 1 << 60)),
        *(device.offer(1, data, device=name) for name in ("a", "c", "nobody")),
        device.offer(1, data, params=huge),
        device.offer(1, bytes(60 << 10)),
        device.offer(1, data, run="another"),
        device.offer(1, data, start=bytes(16)),
        Want(digest=bytes(16), frame_bytes=1024, ranges=[(0, 1)]),
        frames.encode(device.offer(1, data).params, 0, [memoryview(data)[:1024]]),
        b"FC\x01short",
        b"FM\x01noise",
        b"",
    ]


async def flood(device: Device, said: list[bytes | Features | Want]) -> None:
    """Say all of it again and again, 10,000 times a second."""
    name = topic(SITE, device.puppet.name, "features")
    words = [one if isinstance(one, bytes) else wire.encode(one) for one in said]
    while True:
        for _ in range(PER_S // 100 // len(words)):
            for data in words:
                await device.puppet.transport.publish(name, data, assured=False)
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("kind", ["nonsense", "the step ahead", "the step before"])
async def test_the_steps_of_others_go_on_whatever_a_member_says(tmp_path, kind):
    """The flooder costs two deadlines, as any device that delivers nothing; the other steps take no longer for it.

    Each offer that was answered had everybody wait until the broker had confirmed the answer.
    """
    clock = asyncio.get_running_loop().time
    async with two(tmp_path, broker=Confirming(), link=LinkConfig(frame_bytes=1024), **LONG) as (_, a, b):
        await asyncio.gather(a.give(1), b.give(1))
        words = {"the step ahead": [b.offer(STEPS, features(1))], "the step before": [b.offer(1, features(1))]}
        took = []
        async with background(flood(b, words.get(kind) or nonsense(b))):
            for step in range(2, STEPS + 1):
                began = clock()
                word = await a.give(step)
                assert isinstance(word, Gradient)
                assert word.step == step
                took.append(clock() - began)
        late = [seconds for seconds in took if seconds >= DEADLINE_S]
        assert len(late) <= PATIENCE
        assert sum(took) - len(late) * DEADLINE_S < STEPS * ANSWER_S + BURST * ANSWER_S


@pytest.mark.virtual_time
async def test_who_asks_for_its_gradients_without_end_is_sent_some_copies_and_little_for_ever():
    """As a member that asks for parameters; who asks for each gradient twice is sent all of it."""
    loop, broker, data = asyncio.get_running_loop(), MemoryTransport(), bytes(1 << 20)
    gradients = StepPayloads(SITE, broker, loop.time, LinkConfig(), {}, {})

    async def ask(name: str, steps: int, times: int) -> float:
        async with broker.subscribe(topic(SITE, name, "gradient")) as inbox, background(gradients.queue.run()):
            for step in range(steps):
                sent = Sender.of_parts([memoryview(step.to_bytes(8, "big")), memoryview(data)], 32 << 10)
                session = DeviceSession(name, gradient=sent)
                want = Want(digest=sent.transfer.digest, frame_bytes=32 << 10, ranges=[(0, sent.transfer.blocks)])
                for _ in range(times):
                    gradients.answer_want(session, want)
                    await asyncio.sleep(0.01)
            return sum(len(said) for _, said in inbox.drain()) / len(data)

    assert await ask("honest", 20, 2) == pytest.approx(40, rel=0.01)
    assert COPIES < await ask("greedy", 1, 200) <= COPIES + (MORE_BYTES + 2 * MORE_PER_S) / len(data) + 1


async def test_features_that_were_asked_for_and_come_too_late_are_no_flood(tmp_path, caplog):
    """Who is overtaken by each step that it sends features of was taken for one that floods, and not heard for 10 s."""
    data, steps, size = bytes(4 << 20), 60, 256 << 10
    more = {"algorithm": f'name = "plain-split"\noptions = {{ steps = {steps} }}', "round": LONG["round"]}
    late = 0
    async with two(tmp_path, link=LinkConfig(), **more) as (_, a, b):
        for step in range(1, steps + 1):
            changed = memoryview(step.to_bytes(8, "big") + data)
            offer = b.offer(step, changed)
            offer = replace(offer, params=replace(offer.params, frame_bytes=size))
            await b.say(offer)
            want = await wanted(b, offer, changed)
            assert isinstance(await a.give(step), Gradient)
            late += await answer(b, offer, changed, want)
    assert late > 12 << 20
    assert not [line for line in caplog.messages if "floods" in line]


async def wanted(device: Device, offer: Features, data: memoryview) -> Want:
    """Answer wishes for small frames at once; return the first one for large ones."""
    while True:
        word = await device.heard()
        if isinstance(word, Want) and word.digest == offer.params.digest:
            if word.frame_bytes == offer.params.frame_bytes:
                return word
            await answer(device, offer, data, word)


async def answer(device: Device, offer: Features, data: memoryview, want: Want) -> int:
    """Send what is asked for; return its bytes."""
    size = 0
    for start, stop in frames.pieces(want, offer.params, want.frame_bytes):
        part = data[start * BLOCK_BYTES : stop * BLOCK_BYTES]
        await device.say(frames.encode(offer.params, start, [part]))
        size += len(part)
    return size
