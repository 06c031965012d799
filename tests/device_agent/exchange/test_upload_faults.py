"""Updates on their way out: what nobody should have said, and a broker that is away; every second is virtual."""

from __future__ import annotations

import asyncio

import pytest

from shared.errors import Unreachable
from shared.protocol import wire
from shared.protocol.messages import Update, Want
from shared.protocol.topics import topic
from shared.transport.memory import MemoryTransport
from tests.device_agent.server_side import DATA, DEVICE, PAST_JITTER_S, SITE, ack


@pytest.mark.parametrize("ranges", [[(0, 7)], [(6, 7)], [(3, 3)], [(4, 2)], [(-1, 2)], []])
def test_frames_that_do_not_exist_are_not_sent(desk, at_desk, describe, ranges) -> None:
    desk.put(1, DATA, describe(DATA))

    async def story() -> None:
        await desk.tell(Want(digest=describe(DATA).digest, frame_bytes=1024, ranges=ranges))
        assert desk.frames == []
        await desk.tell(Want(digest=describe(DATA).digest, frame_bytes=1024, ranges=[(0, 1)]))
        assert desk.frames == [0]

    at_desk(story)


def test_a_want_for_what_is_not_here_is_harmless(desk, at_desk, describe) -> None:
    """An unknown digest, a failure without payload, a payload that has gone from the disk: the next want is served."""
    desk.outbox.add(Update(run="trial", round=1, device=DEVICE, params=None, failure="no"))
    desk.put(2, DATA, describe(DATA))
    desk.put(3, b"other", describe(b"other"))

    async def story() -> None:
        await desk.tell(Want(digest=bytes(16), frame_bytes=1024, ranges=[(0, 1)]))
        (desk.outbox.entries()[2].payload).unlink()
        await desk.tell(Want(digest=describe(b"other").digest, frame_bytes=1024, ranges=[(0, 1)]))
        assert desk.frames == []
        await desk.tell(Want(digest=describe(DATA).digest, frame_bytes=1024, ranges=[(0, 1)]))
        assert desk.frames == [0]

    at_desk(story)


def test_an_acknowledgement_nobody_waits_for_is_harmless(desk, at_desk, describe) -> None:
    """With an empty outbox, and twice for one update: the next update goes out as ever."""

    async def story() -> None:
        await desk.tell(ack(1))
        desk.put(1, DATA, describe(DATA))
        desk.delivery.wake.set()
        await asyncio.sleep(0.1)
        await desk.tell(ack(1))
        await desk.tell(ack(1))
        desk.put(2, DATA, describe(DATA))
        desk.delivery.wake.set()
        await asyncio.sleep(0.1)
        assert desk.rounds == [1, 2]

    at_desk(story)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello",
        b"FM\x09",
        b"FM\x01\xc1",
        wire.encode(Update(run="r", round=1, device="x", params=None)),
        bytes(2 << 20),
    ],
    ids=["empty", "text", "version", "cut", "unexpected", "huge"],
)
def test_bytes_that_say_nothing_are_dropped(desk, at_desk, describe, data) -> None:
    desk.put(1, DATA, describe(DATA))

    async def story() -> None:
        await desk.transport.publish(topic(SITE, DEVICE, "ack"), data)
        await desk.tell(Want(digest=describe(DATA).digest, frame_bytes=1024, ranges=[(0, 1)]))
        assert desk.frames == [0]

    at_desk(story)


def test_a_broker_that_is_away_only_delays(desk, at_desk, describe) -> None:
    """An offer and a frame that cannot be sent are no end: the offer is repeated, the frame asked for again."""
    refusing = [True]

    class Shaky(MemoryTransport):
        async def publish(self, topic: str, payload: bytes, **options: bool) -> None:
            if refusing[0] and topic.endswith("/update"):
                raise Unreachable("away")
            await super().publish(topic, payload, **options)

    desk.transport = desk.delivery.transport = Shaky()
    desk.put(1, DATA, describe(DATA))

    async def story() -> None:
        await desk.tell(Want(digest=describe(DATA).digest, frame_bytes=1024, ranges=[(0, 2)]))
        assert desk.offers == []
        assert desk.frames == []
        refusing[0] = False
        await asyncio.sleep(PAST_JITTER_S)
        assert desk.rounds == [1]
        await desk.tell(Want(digest=describe(DATA).digest, frame_bytes=1024, ranges=[(0, 2)]))
        assert desk.frames == [0, 1]

    at_desk(story)


def test_ending_it_leaves_no_task_behind(desk, virtually, describe) -> None:
    """Nothing that it started waits on for the inbox after it was cancelled."""
    desk.put(1, DATA, describe(DATA))

    async def routine() -> None:
        async with desk.running():
            pass
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    virtually(routine())
