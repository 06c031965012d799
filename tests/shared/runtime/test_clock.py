"""Virtual time: an hour passes at once, in the right order, and a wait for nothing is found out."""

from __future__ import annotations

import asyncio
import math
import re
import time
from contextlib import suppress
from random import Random

import pytest

from shared.runtime import clock
from tests.naming import naming

pytestmark = pytest.mark.virtual_time


async def test_sleep_jumps():
    """A week of virtual time takes no real time, and time() moves by exactly the week."""
    started = time.monotonic()
    loop = asyncio.get_running_loop()
    before = loop.time()
    await asyncio.sleep(7 * 86_400.0)
    assert (loop.time() - before) == 7 * 86_400.0
    assert time.monotonic() - started < 60


async def test_timers_fire_at_their_time_and_in_order():
    """Three sleepers, started out of order, wake at 1, 2.5 and 4; what computes between them takes no time."""
    woken = []

    async def sleeper(seconds: float) -> None:
        await asyncio.sleep(seconds)
        sum(range(100_000))
        woken.append((seconds, asyncio.get_running_loop().time()))

    await asyncio.gather(sleeper(4.0), sleeper(1.0), sleeper(2.5))
    assert woken == [(1.0, 1.0), (2.5, 2.5), (4.0, 4.0)]


def test_what_is_waited_for_without_end_is_an_error(virtually, monkeypatch):
    """A wait that time need not move for, again and again, is found out; time that moves in between is none."""
    monkeypatch.setattr(clock, "MOST_TURNS", 1000)

    async def waits(seconds: float) -> None:
        for _ in range(3000):
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await asyncio.Event().wait()

    virtually(waits(1e-3))
    with pytest.raises(RuntimeError, match=naming("virtual time", "0.0 s")):
        virtually(waits(0.0))


def test_what_is_left_is_nothing_or_more_than_time_moves_by():
    """Whenever the wait began; counted up from there, a fifth of these left what no clock shows."""
    draws = Random(1)
    for _ in range(10_000):
        began, wait_s = draws.uniform(0, 100), draws.choice([2.0, 60.0, 4000.0])
        for now in (began, began + wait_s / 3, began + wait_s, math.nextafter(began + wait_s, 0)):
            left = clock.remaining_s(began + wait_s, now)
            assert now + left > now or left == 0.0
        assert clock.remaining_s(began + wait_s, began + wait_s) == 0.0


async def test_timeouts_are_virtual():
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3600):
            await asyncio.Event().wait()
    assert asyncio.get_running_loop().time() == 3600.0


async def test_many_small_steps_add_up():
    """Ten thousand steps of 0.1 s: no step is skipped, repeated or stuck, also late in virtual time."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(1e6)
    for _ in range(10_000):
        await asyncio.sleep(0.1)
    assert loop.time() == pytest.approx(1e6 + 1000, abs=1e-4)


def test_a_wait_for_nothing_is_an_error(virtually):
    """Everybody waits and no timer is set: in real time that would hang for ever. Blocks are left on the way out."""
    left = []

    async def stuck() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            left.append(True)

    with pytest.raises(RuntimeError, match="virtual time"):
        virtually(stuck())
    assert left == [True]


def test_two_runs_are_the_same_run(virtually):
    """A hundred tasks that sleep the same and different times finish in the same order each time."""

    async def finish() -> list[int]:
        done: list[int] = []

        async def one(number: int) -> None:
            for _ in range(5):
                await asyncio.sleep((number * 7 % 10) / 10)
            done.append(number)

        await asyncio.gather(*map(one, range(100)))
        return done

    assert virtually(finish()) == virtually(finish())


def test_real_time():
    """The real clock never goes back; the stamp sorts as time does and may stand in a topic and a file name."""
    assert clock.monotonic() <= clock.monotonic()
    stamp = clock.utc_stamp()
    assert re.fullmatch(r"20\d{6}T\d{6}Z", stamp)
    assert stamp <= clock.utc_stamp()


async def test_what_runs_elsewhere_is_asked_for_before_time_moves():
    """Only when nothing is left to do at that moment, once for each thing it does, and time stands meanwhile."""
    asked, done = [], []
    loop = asyncio.get_running_loop()
    results = [loop.create_future() for _ in range(2)]

    def settle() -> bool:
        asked.append((loop.time(), len(done)))
        if loop.time() < 3.0 or not results:
            return False
        results.pop(0).set_result(None)
        return True

    async def follow(result: asyncio.Future[None]) -> None:
        await result
        for _ in range(3):
            await asyncio.sleep(0)
        done.append(loop.time())

    loop.before_time_moves(settle)
    following = [asyncio.ensure_future(follow(result)) for result in results]
    await asyncio.sleep(3.0)
    await asyncio.gather(*following)
    assert done == [3.0, 3.0]
    assert [one for one in asked if one[0] == 3.0] == [(3.0, 0), (3.0, 1)]
