"""Jobs end in the order in which they are due, whatever the processes that do them are doing."""

from __future__ import annotations

import asyncio

import pytest

from edge_server.replay.jobs import JobQueue
from shared.runtime.clock import VirtualLoop
from tests.edge_server.replay.test_pool import order


class Pool:
    """Notes what it is asked, and answers with the names of the drafts."""

    def __init__(self) -> None:
        self.given, self.waited, self.dropped = {}, [], []

    def submit_batch(self, number, orders):
        self.given[number] = [one.job.draft for one in orders]

    def wait(self, number):
        self.waited.append(number)
        return [None if name == "good" else name for name in self.given[number]]

    def drop(self, number):
        self.dropped.append(number)


def played(together, *tasks):
    """Run (begin, seconds, name, cancelled at) on virtual time; return what ended when, and the pool."""
    pool, ended = Pool(), []
    jobs = JobQueue(pool, together)

    async def one(begin, seconds, name):
        loop = asyncio.get_running_loop()
        await asyncio.sleep(begin)
        ticket = jobs.submit(order(name))
        try:
            await asyncio.sleep(seconds)
            cause = await jobs.await_end(ticket)
        except asyncio.CancelledError:
            jobs.withdraw(ticket)
            raise
        ended.append((loop.time(), cause))
        await asyncio.sleep(0)  # what follows at once comes before the next result
        ended.append("after")

    async def everything():
        loop = asyncio.get_running_loop()
        loop.before_time_moves(jobs.settle)
        running = []
        for begin, seconds, name, cancelled in tasks:
            task = asyncio.ensure_future(one(begin, seconds, name))
            running.append(task)
            if cancelled is not None:
                loop.call_at(cancelled, task.cancel)
        await asyncio.gather(*running, return_exceptions=True)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(everything())
    return ended, pool


def test_results_come_at_their_virtual_time_one_after_the_other():
    """Two that end at the same second are settled in the order they began, the first one's consequences between."""
    ended, pool = played(1, (0.0, 5.0, "x", None), (1.0, 4.0, "y", None), (2.0, 1.0, "z", None))
    assert ended == [(3.0, "z"), "after", (5.0, "x"), "after", (5.0, "y"), "after"]
    assert pool.given == {1: ["x"], 2: ["y"], 3: ["z"]}
    assert pool.waited == [3, 1, 2]


def test_batches_are_as_even_as_can_be():
    """Five that may be four together are three and two, so that two processes end at about the same time."""
    tasks = [(0.0, 5.0, name, None) for name in "abcde"]
    assert played(4, *tasks)[1].given == {1: ["a", "b", "c"], 2: ["d", "e"]}


def test_batches_are_what_waits_when_the_first_result_is_needed():
    """Three begin before any ends; the fourth begins later. No batch is larger than was said."""
    tasks = [(0.0, 5.0, "a", None), (1.0, 5.0, "b", None), (2.0, 5.0, "c", None), (6.0, 1.0, "d", None)]
    ended, pool = played(2, *tasks)
    assert pool.given == {1: ["a", "b"], 2: ["c"], 3: ["d"]}
    assert [one for one in ended if one != "after"] == [(5.0, "a"), (6.0, "b"), (7.0, "c"), (7.0, "d")]
    assert pool.waited == [1, 2, 3]


@pytest.mark.parametrize(
    ("together", "dropped", "waited"), [(1, [1], [2]), (2, [], [1])], ids=["a batch of its own", "with another"]
)
def test_a_job_is_withdrawn_when_its_device_does_something_else(together, dropped, waited):
    """The other one ends as it would have; nobody works at the draft of the withdrawn one any more."""
    ended, pool = played(together, (0.0, 5.0, "x", 4.0), (0.0, 3.0, "y", None))
    assert [one for one in ended if one != "after"] == [(3.0, "y")]
    assert (pool.dropped, pool.waited) == (dropped, waited)


def test_a_job_that_was_never_begun_is_forgotten():
    """It is withdrawn while it still waits for others."""
    ended, pool = played(2, (0.0, 5.0, "x", 1.0), (2.0, 3.0, "y", None))
    assert [one for one in ended if one != "after"] == [(5.0, "y")]
    assert pool.given == {1: ["y"]}
