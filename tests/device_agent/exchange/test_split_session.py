"""Split session exchange with a server that answers, forgets, disconnects or continues."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from random import Random

import msgspec
import pytest

from device_agent.exchange.split_session import SplitSessions
from shared.errors import SessionLost
from shared.protocol import wire
from shared.protocol.messages import Assignment, Gradient, Hyper, Missed, Status, Task
from shared.protocol.topics import topic
from shared.runtime.executor import background
from shared.transfer.sender import Sender
from shared.transport.memory import MemoryTransport
from shared.transport.simulated_link import Link, Rate
from tests.device_agent.server_side import DEVICE, FRAME_BYTES, POLICY, SITE, Server, features, gradient
from tests.naming import names_all

pytestmark = pytest.mark.virtual_time


@pytest.fixture
def task(make_task) -> Task:
    return make_task(assignment=Assignment(seed=3, hyper=Hyper(), steps=4))


@asynccontextmanager
async def living(rate: Rate | None = None, **fields: object) -> AsyncIterator[tuple[Server, SplitSessions]]:
    """Run a server; yield it and a device's splitting."""
    transport, clock = MemoryTransport(), asyncio.get_running_loop().time
    server = Server(transport, **fields)
    async with background(server.run()):
        await asyncio.sleep(0.01)
        yield (
            server,
            SplitSessions(Link(transport, rate or Rate(), clock, seed=4), SITE, DEVICE, clock, POLICY, Random(1)),
        )


async def steps(exchange, numbers) -> list[bytes]:
    return [bytes(await exchange(step, [memoryview(features(step))])) for step in numbers]


async def test_steps_go_up_and_come_down_and_from_the_second_on_nothing_is_asked_for(task) -> None:
    """Byte for byte. Of the first step each side asks, since nobody knows the link; then all is pushed."""
    async with living() as (server, splitting):
        async with splitting.session(task) as exchange:
            assert await steps(exchange, [1]) == [gradient(1)]
            first, server.heard = server.heard, Counter()
            assert await steps(exchange, [2, 3, 4]) == [gradient(step) for step in (2, 3, 4)]
        assert server.came == [features(step) for step in (1, 2, 3, 4)]
        assert first["Want"] > 1
        assert server.heard == {"Features": 3, "frame": 3 * 7}
        assert [offer.pushed for offer in server.offers] == [0, 98, 98, 98]
        overhead = 1 + 36 / FRAME_BYTES
        assert 400_000 < exchange.bytes_so_far[0] <= 400_000 * overhead + 36 * 4
        assert 240_000 < exchange.bytes_so_far[1] <= 240_000 * overhead + 36 * 4


@pytest.mark.parametrize("loss", [0.1, 0.4])
async def test_on_a_link_that_loses_frames_every_step_comes_whole(task, loss: float) -> None:
    async with living(Rate(up_bits_per_second=1e6, down_bits_per_second=1e6, delay_s=0.02, loss=loss)) as (
        server,
        splitting,
    ):
        async with splitting.session(task) as exchange:
            assert await steps(exchange, range(1, 5)) == [gradient(step) for step in range(1, 5)]
        assert server.came == [features(step) for step in range(1, 5)]


async def test_on_a_slow_link_no_more_is_pushed_than_three_seconds_of_it(task) -> None:
    """64 kbit/s carries 24,000 bytes in 3 s; a ping behind them passes in time. The window is two frames at least."""
    async with living(Rate(up_bits_per_second=64e3, down_bits_per_second=64e3, delay_s=0.1)) as (server, splitting):
        async with splitting.session(task) as exchange:
            await steps(exchange, range(1, 4))
        assert 0 < max(offer.pushed for offer in server.offers) <= 2 * FRAME_BYTES // 1024
        assert 0 < max(offer.room.blocks for offer in server.offers) <= 2 * FRAME_BYTES // 1024


async def test_a_step_costs_what_its_bytes_take_on_the_link_and_little_more(task) -> None:
    """5 Mbit/s: 100,000 bytes up take 0.16 s, 60,000 down 0.096 s; with headers and delays within 15 %."""
    async with living(Rate(up_bits_per_second=5e6, down_bits_per_second=5e6, delay_s=0.002)) as (_, splitting):
        clock = asyncio.get_running_loop().time
        async with splitting.session(task) as exchange:
            await steps(exchange, [1])
            began = clock()
            await steps(exchange, [2, 3, 4])
        assert 3 * 0.256 < clock() - began < 1.15 * 3 * 0.256


async def test_a_server_that_says_nothing_is_offered_the_features_ever_more_rarely(task) -> None:
    async with living(silent=True) as (server, splitting):
        async with splitting.session(task) as exchange:
            with suppress(TimeoutError):
                async with asyncio.timeout(200):
                    await steps(exchange, [1])
        gaps = [after - before for before, after in zip(server.moments, server.moments[1:], strict=False)]
        assert 1.5 <= gaps[0] <= 2.5
        assert max(gaps) <= 1.25 * 30
        assert len(server.offers) <= 12


async def test_a_server_that_is_back_is_offered_the_features_at_once(task) -> None:
    """The first status is the one that the broker has kept; any later one tells that something was interrupted."""
    async with living(silent=True) as (server, splitting):
        status = wire.encode(Status(device="_server", session=1, instance="a", online=True))
        await server.transport.publish(topic(SITE, "_server", "status"), status, retain=True)
        async with splitting.session(task) as exchange:
            doing = asyncio.create_task(steps(exchange, [1]))
            await asyncio.sleep(1.0)
            assert len(server.offers) == 1
            server.silent = False
            await server.transport.publish(topic(SITE, "_server", "status"), status)
            await asyncio.sleep(0.1)
            assert len(server.offers) == 2
            assert await doing == [gradient(1)]


async def test_a_step_that_goes_on_without_the_device_is_told_while_it_waits_and_while_it_computes(task) -> None:
    async with living(silent=True) as (server, splitting), splitting.session(task) as exchange:
        doing = asyncio.create_task(exchange(1, [memoryview(features(1))]))
        await asyncio.sleep(0.1)
        await server.tell(server.skip(task, 1, 3))
        assert await doing == Missed(2)
        offers = len(server.offers)
        await server.tell(server.skip(task, 3, 9))
        await asyncio.sleep(0.1)
        assert await exchange(3, [memoryview(features(3))]) == Missed(6)
        assert len(server.offers) == offers


async def test_after_a_step_that_went_on_without_the_device_it_sends_nothing_unasked(task) -> None:
    """The next step may be over too before its features are there; where it is not, they are asked for."""
    async with living() as (server, splitting):
        async with splitting.session(task) as exchange:
            await steps(exchange, [1, 2])
            server.silent = True
            doing = asyncio.create_task(exchange(3, [memoryview(features(3))]))
            await asyncio.sleep(0.1)
            await server.tell(server.skip(task, 3, 4))
            assert await doing == Missed(1)
            server.silent = False
            assert await steps(exchange, [4, 5]) == [gradient(4), gradient(5)]
        assert [offer.pushed for offer in server.offers] == [0, 98, 98, 0, 98]


async def test_what_was_said_of_another_step_or_another_session_changes_nothing(task) -> None:
    """A repetition of an older word, one of a round begun with other parameters, a gradient of other features."""
    async with living(silent=True) as (server, splitting), splitting.session(task) as exchange:
        doing = asyncio.create_task(exchange(2, [memoryview(features(2))]))
        await asyncio.sleep(0.1)
        right, offer = server.skip(task, 2, 1), server.offers[-1]
        other = {"run": "other", "round": 9, "start": b"0" * 16, "device": "other", "offered": 1}
        for name, value in other.items():
            await server.tell(msgspec.structs.replace(right, **{name: value}))
        await server.answer(msgspec.structs.replace(offer, params=task.params))
        await server.tell(msgspec.structs.replace(right, step=2))
        await asyncio.sleep(0.1)
        assert not doing.done()
        await server.tell(right)
        with pytest.raises(SessionLost):
            await doing


async def test_a_gradient_that_was_lost_with_the_server_s_memory_is_asked_for_until_the_server_answers_an_offer(
    task,
) -> None:
    """The header came, its frames did not: asked for, in vain, then the features are offered, and it comes again."""
    async with living(silent=True) as (server, splitting), splitting.session(task) as exchange:
        doing = asyncio.create_task(steps(exchange, [1]))
        await asyncio.sleep(0.2)
        server.silent, server.came = True, [features(1)]
        lost = Sender.of_parts([memoryview(gradient(1))], FRAME_BYTES).transfer
        offer = server.offers[-1]
        about = {"run": task.run, "round": task.round, "device": DEVICE, "start": task.params.digest}
        await server.tell(Gradient(**about, step=1, answers=offer.params.digest, params=lost, pushed=59))
        server.silent = False
        assert await doing == [gradient(1)]
        assert server.heard["Want"] >= 1


async def test_an_answer_that_nobody_should_allocate_for_is_dropped(task, caplog) -> None:
    async with living(answers=lambda _: bytes(POLICY.limit + 1)) as (_, splitting), splitting.session(task) as exchange:
        with suppress(TimeoutError):
            async with asyncio.timeout(30):
                await steps(exchange, [1])
    assert names_all(caplog.text, POLICY.limit)
