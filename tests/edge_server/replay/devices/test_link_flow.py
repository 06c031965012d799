"""A link whose rate follows a curve: every byte takes the rate of its own moment."""

from __future__ import annotations

import asyncio

import pytest

from edge_server.replay.devices.curve import Curve, constant, steps
from shared.runtime.clock import VirtualLoop
from shared.transport.memory import MemoryTransport
from shared.transport.simulated_link import Link, Rate

SIZES = (1, 333, 5000, 70_000)


async def arrivals(rate: Rate, *, down: bool) -> list[float]:
    """Send some messages at once, one way; return when each arrives."""
    loop, broker = asyncio.get_running_loop(), MemoryTransport()
    link = Link(broker, rate, loop.time)
    sender, receiver = (broker, link) if down else (link, broker)
    moments = []
    async with receiver.subscribe("a/b") as inbox, asyncio.TaskGroup() as group:
        for size in SIZES:
            group.create_task(sender.publish("a/b", bytes(size)))
        for _ in SIZES:
            await anext(inbox)
            moments.append(loop.time())
    return moments


def sent(rate: Rate, *, down: bool = False) -> list[float]:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(arrivals(rate, down=down))


@pytest.mark.parametrize("down", [False, True])
def test_a_constant_curve_is_a_plain_rate_to_the_last_bit(down):
    """What was replayed with a number is replayed the same with a curve."""
    plain = sent(Rate(7e3, 13e3, delay_s=0.1), down=down)
    assert sent(Rate(constant(7e3), constant(13e3), delay_s=0.1), down=down) == plain
    assert len(set(plain)) == len(SIZES)


def test_messages_follow_one_another_along_the_curve():
    """8 kbit/s for 1 s, nothing for 10 s, then 80 kbit/s: 1 B, 333 B, and the rest of 5000 B after the outage.

    By 1 s 1000 B have passed; of 5334 B 4334 B are left, 0.43 s; the 70,000 B behind them take 7 s more.
    """
    curve = steps([(0.0, 8e3), (1.0, 0.0), (11.0, 80e3)])
    assert sent(Rate(curve)) == pytest.approx([0.001, 0.334, 11.4334, 18.4334])


def test_what_is_under_way_keeps_its_rate_when_the_link_is_tuned():
    """1000 B at 8 kbit/s are there after 1 s; 1000 B sent after the change at 80 kbit/s follow 0.1 s later."""

    async def go() -> list[float]:
        loop, broker = asyncio.get_running_loop(), MemoryTransport()
        link, moments = Link(broker, Rate(8e3), loop.time), []
        async with broker.subscribe("a/b") as inbox, asyncio.TaskGroup() as group:
            group.create_task(link.publish("a/b", bytes(1000)))
            await asyncio.sleep(0.5)
            link.tune(Rate(80e3))
            group.create_task(link.publish("a/b", bytes(1000)))
            for _ in range(2):
                await anext(inbox)
                moments.append(loop.time())
        return moments

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(go()) == pytest.approx([1.0, 1.1])


def test_behind_the_end_of_a_curve_nothing_arrives():
    """A device whose link is dead for good does not stop virtual time: others have timers."""

    async def go() -> bool:
        curve: Curve = steps([(0.0, 8e3)], after="zero", end_s=1.0)
        broker = MemoryTransport()
        link = Link(broker, Rate(curve), asyncio.get_running_loop().time)
        try:
            async with asyncio.timeout(1e6):
                await link.publish("a/b", bytes(2000))
        except TimeoutError:
            return True
        return False

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(go())
