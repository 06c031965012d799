"""When a board says again how it stands, and asks again for what it lacks; in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from device_agent.exchange.resend import announce, ask
from shared.errors import Unreachable
from shared.protocol import wire
from shared.protocol.inference.rollout import Releases

pytestmark = pytest.mark.virtual_time


class Broker:
    """Notes when something was published, and what; away until a time."""

    def __init__(self, away_until: float = 0.0) -> None:
        self.away_until, self.heard = away_until, list[tuple[float, object, bool]]()

    async def publish(self, name: str, data: bytes, *, retain: bool = False) -> None:
        assert name == "a/topic"
        now = asyncio.get_running_loop().time()
        if now < self.away_until:
            raise Unreachable("no broker")
        self.heard.append((now, wire.decode(data), retain))


async def test_news_is_announced_at_once_and_what_is_known_each_minute() -> None:
    broker, changed, start = Broker(), asyncio.Event(), asyncio.get_running_loop().time()
    said = Releases(device="pi", instance="1", models=())

    async def current() -> Releases:
        return said

    announcing = asyncio.create_task(announce(broker, "a/topic", changed, current))
    await asyncio.sleep(70)
    said = Releases(device="pi", instance="2", models=())
    changed.set()
    await asyncio.sleep(65)
    announcing.cancel()
    found = [(round(at - start), word.instance, retain) for at, word, retain in broker.heard]
    assert found == [(0, "1", True), (60, "1", True), (70, "2", True), (130, "2", True)]


async def test_a_broker_that_is_away_is_tried_every_other_second() -> None:
    start = asyncio.get_running_loop().time()
    broker = Broker(start + 5)

    async def current() -> Releases:
        return Releases(device="pi", models=())

    announcing = asyncio.create_task(announce(broker, "a/topic", asyncio.Event(), current))
    await asyncio.sleep(60)
    announcing.cancel()
    assert [round(at - start) for at, _, _ in broker.heard] == [6]


@pytest.mark.parametrize("is_reachable", [True, False])
async def test_what_lacks_is_asked_for_ever_less_often_until_there_is_an_answer(is_reachable) -> None:
    """Something that is no answer neither ends it nor has it asked again early."""
    loop = asyncio.get_running_loop()
    start, asked, answered, came = loop.time(), list[float](), asyncio.Event(), list[str]()

    async def say() -> None:
        asked.append(loop.time() - start)
        if not is_reachable:
            raise Unreachable("no broker")

    async def other() -> None:
        for at, what in ((18, "another's"), (200, "its")):
            await asyncio.sleep(start + at - loop.time())
            came.append(what)
            answered.set()

    speaking = asyncio.create_task(other())
    found = await ask(say, answered, lambda: "found" if came[-1:] == ["its"] else None)
    await speaking
    assert (found, loop.time() - start) == ("found", pytest.approx(200))
    assert asked == pytest.approx([0, 5, 15, 35, 75, 135, 195])
