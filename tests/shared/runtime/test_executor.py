"""Where blocking work runs: elsewhere, here, or here at a price in virtual time."""

from __future__ import annotations

import asyncio
import threading

import pytest

from shared.runtime.executor import costing, in_thread, inline


def work(a: int, *, b: int) -> tuple[int, int]:
    return a - b, threading.get_ident()


def fail() -> None:
    raise ValueError("no")


@pytest.mark.parametrize("worker", [in_thread, inline], ids=["in_thread", "inline"])
def test_gives_the_result_or_the_error(worker):
    """With arguments by place and by name; the thread is another one exactly where it should be."""

    async def use() -> None:
        result, thread = await worker(work, 5, b=3)
        assert result == 2
        assert (thread == threading.get_ident()) == (worker is inline)
        with pytest.raises(ValueError, match="no"):
            await worker(fail)

    asyncio.run(use())


def test_in_thread_leaves_the_loop_free():
    """While the thread waits, the loop goes on; it is the loop that lets the thread go."""

    async def use() -> bool:
        free = threading.Event()
        waiting = asyncio.create_task(in_thread(free.wait, 10))
        await asyncio.sleep(0)
        free.set()
        return await waiting

    assert asyncio.run(use()) is True


def test_costing_charges_virtual_time(virtually):
    """The function runs at once, its result comes seconds later; an error costs nothing. `inline` is free."""

    async def use() -> list[float]:
        loop = asyncio.get_running_loop()
        ran: list[float] = []
        await costing(2.5)(lambda: ran.append(loop.time()))
        with pytest.raises(ValueError, match="no"):
            await costing(2.5)(fail)
        await inline(lambda: ran.append(loop.time()))
        return ran

    assert virtually(use()) == [0.0, 2.5]
