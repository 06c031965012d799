"""Simulated link in virtual time: exact rate and delay."""

from __future__ import annotations

import asyncio

import pytest

from shared.errors import Unreachable
from shared.protocol.messages import Transfer
from shared.transfer import frames
from shared.transport.memory import MemoryTransport
from shared.transport.simulated_link import Link, Rate

pytestmark = pytest.mark.virtual_time

KILO = bytes(1000)
SLOW = Rate(up_bits_per_second=8000.0, down_bits_per_second=16_000.0, delay_s=0.25)
FRAME = frames.encode(Transfer(digest=bytes(16), size=976, frame_bytes=976), 0, [memoryview(bytes(976))])


def now() -> float:
    return asyncio.get_running_loop().time()


def link(inner, rate: Rate, seed: int = 0) -> Link:
    return Link(inner, rate, asyncio.get_running_loop().time, seed)


async def arrivals(inbox, number: int) -> list[tuple[float, int]]:
    """Return when each of so many deliveries came, and its last byte."""
    return [((await anext(inbox))[1][-1], now())[::-1] for _ in range(number)]


async def test_the_way_up_assured():
    """Accepted when it arrives: transmission and delay, one after the other where the publisher waits."""
    broker = MemoryTransport()
    up = link(broker, SLOW)
    async with broker.subscribe("#") as inbox:
        await up.publish("x", KILO)
        assert now() == 1.25
        await up.publish("x", KILO + KILO)
        assert now() == 1.25 + 2.25
        assert [len((await anext(inbox))[1]) for _ in range(2)] == [1000, 2000]


async def test_the_way_up_at_once():
    """Three publishers at the same time share the line: 1, 2 and 3 s of transmission, each with one delay."""
    broker = MemoryTransport()
    up = link(broker, SLOW)
    async with broker.subscribe("#") as inbox:
        publishing = asyncio.gather(*(up.publish("x", KILO[:-1] + bytes([n])) for n in range(3)))
        assert await arrivals(inbox, 3) == [(1.25, 0), (2.25, 1), (3.25, 2)]
        await publishing


async def test_the_way_up_not_assured():
    """Frames follow each other without waiting for the delay, as on any socket: n of them take n s and one delay."""
    broker = MemoryTransport()
    up = link(broker, SLOW)
    async with broker.subscribe("#") as inbox:
        for number in range(4):
            await up.publish("x", KILO[:-1] + bytes([number]), assured=False)
            assert now() == number + 1
        await up.publish("x", b"\xff")
        assert now() == 4.251
        assert [await anext(inbox) for _ in range(5)][-1] == ("x", b"\xff")

    async with broker.subscribe("#") as inbox:
        receiving = asyncio.create_task(arrivals(inbox, 2))
        begin = now()
        for number in range(2):
            await up.publish("x", KILO[:-1] + bytes([number]), assured=False)
        assert await receiving == [(begin + 1.25, 0), (begin + 2.25, 1)]


async def test_the_way_down():
    """2 kB/s down: what is published at once arrives 0.5 s apart, one delay behind; an idle line starts afresh."""
    broker = MemoryTransport()
    async with link(broker, SLOW).subscribe("#") as inbox:
        for number in range(3):
            await broker.publish("x", KILO[:-1] + bytes([number]))
        assert await arrivals(inbox, 3) == [(0.75, 0), (1.25, 1), (1.75, 2)]
        await asyncio.sleep(8.25)
        await broker.publish("x", KILO)
        assert await arrivals(inbox, 1) == [(10.75, 0)]


async def test_both_ways_and_all_subscriptions_share_what_they_should():
    """Up and down do not slow each other; two subscriptions of one device share its line, two devices do not."""
    broker = MemoryTransport()
    first, second = link(broker, SLOW), link(broker, SLOW)
    async with first.subscribe("a") as a, first.subscribe("b") as b, second.subscribe("a") as other:
        going_up = asyncio.create_task(first.publish("up", KILO))
        await broker.publish("a", KILO)
        await broker.publish("b", KILO)
        results = await asyncio.gather(arrivals(a, 1), arrivals(b, 1), arrivals(other, 1))
        assert results == [[(0.75, 0)], [(1.25, 0)], [(0.75, 0)]]
        await going_up
        assert now() == 1.25


@pytest.mark.parametrize("rate", [Rate(), Rate(delay_s=0.5), Rate(up_bits_per_second=8e3, down_bits_per_second=8e3)])
@pytest.mark.parametrize("assured", [True, False])
async def test_order(rate, assured):
    """Fifty messages at once, with no rate all at the same moment: up and down in the order they were sent."""
    broker = MemoryTransport()
    a = link(broker, rate)
    async with broker.subscribe("up") as up, a.subscribe("down") as down:
        sending = asyncio.gather(*(a.publish("up", bytes([number]), assured=assured) for number in range(50)))
        for number in range(50):
            await broker.publish("down", bytes([number]))
        assert [byte for _, byte in await arrivals(down, 50)] == list(range(50))
        assert [byte for _, byte in await arrivals(up, 50)] == list(range(50))
        await sending


def test_loss_is_of_frames_only(virtually):
    """A third of 600 frames vanish each way, by the seed; no assured message does. A lost frame takes its time, too."""

    async def use(seed: int) -> tuple[list[int], float]:
        broker = MemoryTransport()
        lossy = link(broker, Rate(up_bits_per_second=8000.0, loss=1 / 3), seed)
        got = []
        async with broker.subscribe("up") as up, lossy.subscribe("down") as down:
            for _ in range(600):
                await lossy.publish("up", FRAME, assured=False)
            took = now()
            for _ in range(100):
                await lossy.publish("up", b"message")
            await lossy.publish("up", b"end")
            for _ in range(600):
                await broker.publish("down", FRAME)
                await broker.publish("down", b"message")
            await broker.publish("down", b"end")
            for inbox in (up, down):
                kinds = []
                while not kinds or kinds[-1] != b"end":
                    kinds.append((await anext(inbox))[1])
                got += [kinds.count(FRAME), kinds.count(b"message")]
        return got, took

    (up, told, down, messages), took = virtually(use(1))
    assert 350 < up < 450
    assert 350 < down < 450
    assert (told, messages) == (100, 600)
    assert took == pytest.approx(600 * len(FRAME) / 1000)
    assert virtually(use(1)) == ([up, told, down, messages], took)
    assert virtually(use(2))[0] != [up, told, down, messages]


async def test_retained_messages_pass():
    """Up with the flag, down to whoever subscribes later, and both take their time."""
    broker = MemoryTransport()
    a = link(broker, SLOW)
    await a.publish("status", KILO, retain=True)
    async with a.subscribe("status") as inbox:
        assert await arrivals(inbox, 1) == [(1.25 + 0.75, 0)]


async def test_a_broker_that_is_away():
    """Whoever publishes assured is told; a frame is lost, as frames are, and nobody complains; the link goes on."""

    class Away(MemoryTransport):
        async def publish(self, topic, payload, *, retain=False, assured=True):
            if topic == "away":
                raise Unreachable("away")
            await super().publish(topic, payload, retain=retain, assured=assured)

    broker = Away()
    a = link(broker, SLOW)
    with pytest.raises(Unreachable):
        await a.publish("away", KILO)
    await a.publish("away", KILO, assured=False)
    async with broker.subscribe("#") as inbox:
        await a.publish("x", KILO)
        assert await anext(inbox) == ("x", KILO)


async def test_a_cancelled_publisher_does_not_block_the_line():
    """Who gives up waiting leaves the others their turn."""
    broker = MemoryTransport()
    a = link(broker, SLOW)
    async with broker.subscribe("y") as inbox:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(a.publish("x", KILO), 0.5)
        await a.publish("y", KILO)
        assert await anext(inbox) == ("y", KILO)
        assert now() == 2.25


async def test_while_a_link_is_down_nothing_passes():
    """Publishing is refused, what is in the air is lost, messages to the device wait; then all is as before."""
    broker = MemoryTransport()
    there = link(broker, SLOW)
    async with broker.subscribe("up") as up, there.subscribe("down") as down:
        sending = asyncio.create_task(there.publish("up", KILO))
        await asyncio.sleep(0.5)
        there.connected.clear()
        with pytest.raises(Unreachable):
            await there.publish("up", KILO, assured=False)
        with pytest.raises(Unreachable):
            await sending
        await broker.publish("down", FRAME)
        await broker.publish("down", b"message")
        await asyncio.sleep(5.0)
        assert list(down.drain()) == []
        there.connected.set()
        assert (await anext(down))[1] == b"message"
        await there.publish("up", b"again")
        assert (await anext(up))[1] == b"again"


async def test_without_limits_everything_passes_at_once_and_in_order():
    """No time, no task for a message; what came behind a slower one still waits for it."""
    broker = MemoryTransport()
    free = link(broker, Rate())
    async with broker.subscribe("up") as up:
        for number in range(3):
            await free.publish("up", bytes([number]), assured=number != 1)
        assert [arrived[1] for arrived in await arrivals(up, 3)] == [0, 1, 2]
        assert now() == 0.0
        free.tune(SLOW)
        slow = asyncio.create_task(free.publish("up", KILO))
        await asyncio.sleep(0)
        free.tune(Rate())
        await free.publish("up", b"later")
        assert [len((await anext(up))[1]) for _ in range(2)] == [1000, 5]
        await slow
