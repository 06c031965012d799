"""Races while the server awaits the broker: no step is spoilt."""

from __future__ import annotations

import asyncio

import pytest

from edge_server.plan.server_config import LinkConfig
from edge_server.rounds.split.device_session import DeviceSession
from edge_server.rounds.split.gradient_store import GradientStore
from edge_server.rounds.split.payloads import StepPayloads
from shared.protocol import wire
from shared.protocol.messages import BLOCK_BYTES, Features, Gradient, Room, Skip, Want
from shared.protocol.topics import parse_channel
from shared.transfer import frames as chunks
from shared.transfer.frames import MAX_WINDOW
from shared.transfer.sender import Sender
from shared.transport.memory import MemoryTransport
from tests.edge_server.rounds.split.test_session import DEADLINE_S, features, rest, two

pytestmark = [pytest.mark.usefixtures("plain_split"), pytest.mark.virtual_time]

SLOW_S = 1.0


class Slow(MemoryTransport):
    """A broker that takes its time over every Skip."""

    async def publish(self, topic: str, payload: bytes, *, retain: bool = False, assured: bool = True) -> None:
        """Publish, a Skip late."""
        is_word = parse_channel(topic) == "gradient" and not chunks.is_frame(payload)
        if is_word and isinstance(wire.decode(payload), Skip):
            await asyncio.sleep(SLOW_S)
        await super().publish(topic, payload, retain=retain, assured=assured)


@pytest.mark.parametrize("ahead", [0, 1], ids=["the same step again", "the next step"])
async def test_an_offer_while_others_are_told_that_they_are_late_spoils_no_step(tmp_path, ahead):
    """Who has delivered is given that step's gradient, never the one before; and who runs ahead ends no server."""
    async with two(tmp_path, broker=Slow()) as (here, a, b):
        await asyncio.gather(a.give(1), b.give(1))
        await b.say(b.offer(2, features(2)))  # and sends nothing
        giving = asyncio.create_task(a.give(2))
        await asyncio.sleep(DEADLINE_S + SLOW_S / 2)
        await a.say(a.offer(2 + ahead, features(2 + ahead)))
        given = await giving
        again = await a.give(2)
        assert isinstance(given, Gradient)
        assert isinstance(again, Gradient)
        assert given.params == again.params
        while not isinstance(await b.heard(), Skip):
            pass
        closed = await rest(here, a, b, first=3)
        assert closed.missed == {"b": 1}


def payloads_over(broker: MemoryTransport) -> StepPayloads:
    return StepPayloads("lab", broker, asyncio.get_running_loop().time, LinkConfig(), {}, {})


@pytest.mark.virtual_time
async def test_who_asks_for_its_gradient_without_end_is_sent_a_window_of_it():
    """Wishes that overlap: nothing of it waits twice, and another's frame goes behind one of them."""
    broker, data = MemoryTransport(), bytes(200 * BLOCK_BYTES)
    gradients, sent = payloads_over(broker), Sender.of_parts([memoryview(data)], BLOCK_BYTES)
    greedy, other = DeviceSession("greedy", gradient=sent), DeviceSession("other", gradient=sent)
    for number in range(1000):
        ranges = [(number % 100, 200)]
        gradients.answer_want(greedy, Want(digest=sent.transfer.digest, frame_bytes=BLOCK_BYTES, ranges=ranges))
    gradients.answer_want(other, Want(digest=sent.transfer.digest, frame_bytes=BLOCK_BYTES, ranges=[(0, 2)]))
    async with broker.subscribe("#") as inbox:
        task = asyncio.create_task(gradients.queue.run())
        await asyncio.sleep(1)
        task.cancel()
        names = [name.split("/")[-2] for name, _ in inbox.drain()]
    assert names.count("greedy") == MAX_WINDOW
    assert names[:4] == ["greedy", "other", "greedy", "other"]


@pytest.mark.virtual_time
async def test_who_offers_the_same_features_without_end_is_not_sent_their_gradient_as_often():
    """Each offer may have a gradient pushed: more than wait anyhow would keep those of the others waiting."""
    broker, data = MemoryTransport(), bytes(4 * BLOCK_BYTES)
    gradients, sent = payloads_over(broker), Sender.of_parts([memoryview(data)], BLOCK_BYTES)
    about = {"run": "trial", "round": 1, "device": "a", "start": bytes(16), "step": 1, "params": sent.transfer}
    offer = Features(**about, room=Room(blocks=1 << 40))
    session = DeviceSession("a")
    session.answers.serve(1, sent.transfer.digest)
    session.answers.put(1, sent, GradientStore(0))
    async with broker.subscribe("#") as inbox:
        for _ in range(100):
            await gradients.announce(session, offer)
        task = asyncio.create_task(gradients.queue.run())
        await asyncio.sleep(1)
        task.cancel()
        frames = [data for _, data in inbox.drain() if chunks.is_frame(data)]
    assert len(frames) == sent.transfer.blocks
