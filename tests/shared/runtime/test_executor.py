"""Where blocking work runs: elsewhere, here, or here at a price in virtual time."""

from __future__ import annotations

import asyncio
import threading

import pytest

from shared.runtime.executor import Effect, build_charging_worker, in_thread, inline, run_uninterrupted


def work(a: int, *, b: int) -> tuple[int, int]:
    return a - b, threading.get_ident()


def fail() -> None:
    raise ValueError("no")


@pytest.mark.parametrize("worker", [in_thread, inline], ids=["in_thread", "inline"])
async def test_gives_the_result_or_the_error(worker):
    """With arguments by place and by name; the thread is another one exactly where it should be."""
    result, thread = await worker(work, 5, b=3)
    assert result == 2
    assert (thread == threading.get_ident()) == (worker is inline)
    with pytest.raises(ValueError, match="no"):
        await worker(fail)


async def test_in_thread_leaves_the_loop_free():
    """While the thread waits, the loop goes on; it is the loop that lets the thread go."""
    free = threading.Event()
    waiting = asyncio.create_task(in_thread(free.wait, 10))
    await asyncio.sleep(0)
    free.set()
    assert await waiting is True


@pytest.mark.virtual_time
async def test_work_is_charged_by_its_name_and_arguments():
    """An effect runs at once, its result comes seconds later; an error costs nothing, nor does work without a name."""
    loop, worker = asyncio.get_running_loop(), build_charging_worker({"step": lambda count=1: 2.5 * count})
    ran: list[float] = []
    await worker(Effect("step", lambda _count: ran.append(loop.time())), 2)
    with pytest.raises(ValueError, match="no"):
        await worker(Effect("step", fail))
    await worker(Effect("other", lambda: ran.append(loop.time())))
    await worker(lambda: ran.append(loop.time()))
    await inline(lambda: ran.append(loop.time()))
    assert ran == [0.0, 5.0, 5.0, 5.0]


@pytest.mark.virtual_time
async def test_what_may_not_be_interrupted_ends_before_whoever_waits_for_it_does():
    """The one that waits is cancelled all the same."""
    told: list[str] = []

    async def work() -> None:
        await asyncio.sleep(5.0)
        told.append("ended")

    waiting = asyncio.create_task(run_uninterrupted(work()))
    await asyncio.sleep(1.0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert [*told, "cancelled"] == ["ended", "cancelled"]
