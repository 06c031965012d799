"""Training in this process or in workers: equal results, one error per crash."""

from __future__ import annotations

import os
import signal
import time

import pytest

from device_agent.measurement.task_meter import BlockCost
from device_agent.trainer.interface import Job
from edge_server.replay.pool import LocalPool, ProcessPool, TrainingOrder, make_pool
from shared.data.spec import Data
from shared.errors import FieldFleetError
from shared.protocol.messages import Assignment, Cost, Hyper, Spec, Task, Transfer
from tests.naming import naming


def order(name: str) -> TrainingOrder:
    """Return an order that is told by its draft."""
    task = Task(
        run="run",
        round=1,
        device="a",
        algorithm=Spec(name="fedavg"),
        model=Spec(name="mlp"),
        codec=Spec(name="dense"),
        assignment=Assignment(seed=1, hyper=Hyper()),
        params=Transfer(digest=bytes(16), size=1, frame_bytes=1024),
        shared=False,
        deadline_s=1.0,
    )
    job = Job(task=task, params="", state="", draft=name, data=Data(source="digits"), frame_bytes=1024, cost=Cost())
    return TrainingOrder(job, BlockCost(compute_s=1.0))


def does(orders):
    """Fail the orders that say so, die where one says that, and be the slower the earlier the order."""
    endings = []
    for one in orders:
        if one.job.draft == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if one.job.draft == "slow":
            time.sleep(0.1)  # noqa: TID251 - a process of its own
        endings.append(f"no {one.job.draft}" if one.job.draft.startswith("bad") else None)
    return endings


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_batch_has_its_own_answer_whenever_it_is_asked_for(workers):
    """Asked for in another order than given; a slow one does not change whose answer is whose."""
    with make_pool(does, workers) as pool:
        pool.submit_batch(1, [order("slow")])
        pool.submit_batch(2, [order("bad-one"), order("good"), order("bad-two")])
        pool.submit_batch(3, [order("good")])
        assert pool.wait(3) == [None]
        assert pool.wait(2) == ["no bad-one", None, "no bad-two"]
        assert pool.wait(1) == [None]


def test_far_more_batches_than_a_socket_holds_block_nobody():
    """A thousand are given before the first answer is asked for, and the last is asked for first."""
    with ProcessPool(does, 2) as pool:
        for number in range(1000):
            pool.submit_batch(number, [order("bad" if number % 7 == 0 else "good")])
        answers = {number: pool.wait(number) for number in reversed(range(1000))}
    assert [number for number in range(1000) if answers[number] == ["no bad"]] == list(range(0, 1000, 7))


def test_a_dropped_batch_is_not_at_work_any_more(tmp_path):
    """One that has begun is waited for, one that waits is never begun; in this process nothing is begun early."""
    begun = tmp_path / "begun"

    def writes(orders):
        for one in orders:
            time.sleep(0.05)  # noqa: TID251 - a process of its own
            with begun.open("a") as file:
                file.write(f"{one.job.draft} ")
        return [None] * len(orders)

    with ProcessPool(writes, 1) as pool:
        for number in range(12):
            pool.submit_batch(number, [order(f"{number}")])
        pool.drop(11)
        pool.drop(0)
        assert begun.read_text().startswith("0 ")
        assert [pool.wait(number) for number in range(1, 11)] == 10 * [[None]]
    assert begun.read_text().split() == [f"{number}" for number in range(11)]
    with LocalPool(writes) as here:
        here.submit_batch(1, [order("never")])
        here.drop(1)
    assert "never" not in begun.read_text()


def test_a_killed_process_is_an_error_that_says_so():
    """Nobody waits for ever for what it had in its hands."""
    with ProcessPool(does, 2) as pool:
        pool.submit_batch(1, [order("die")])
        with pytest.raises(FieldFleetError, match=naming(-9, "--workers")):
            pool.wait(1)


def test_when_all_processes_are_killed_it_is_the_same_error():
    """Nobody reads orders, and what is heard then is the end of a socket and no answer."""
    with ProcessPool(does, 2) as pool:
        for process in pool.processes:
            process.kill()
            process.join()
        pool.submit_batch(1, [order("good")])
        with pytest.raises(FieldFleetError, match=naming(-9)):
            pool.wait(1)


def test_a_batch_that_ctrl_c_has_cut_short_can_be_dropped():
    """Whoever withdraws its jobs is not told that it is unknown."""

    def interrupted(_):
        raise KeyboardInterrupt

    with LocalPool(interrupted) as here:
        here.submit_batch(1, [order("any")])
        with pytest.raises(KeyboardInterrupt):
            here.wait(1)
        here.drop(1)


def test_no_process_outlives_its_pool():
    """They end with the block, whatever they are at."""
    with ProcessPool(does, 2) as pool:
        pool.submit_batch(1, [order("slow")])
        pids = [process.pid for process in pool.processes]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
