"""The trainer with its real child process: warm, cancelled, killed, idle.

The tests share one child, since a child imports torch; each works on its own as well.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from device_agent.exchange.outbox import Outbox
from shared.errors import TaskFailed, TrainerDied
from shared.protocol.messages import Spec
from tests.device_agent.agent_side import ENDLESS, START_S, Host, is_alive, is_locked, until
from tests.naming import naming


@pytest.fixture
def host(shared_trainer, tmp_path: Path, make_job) -> Host:
    return Host(*shared_trainer, Outbox(tmp_path / "outbox", tmp_path / "state"), make_job)


def test_a_job_gives_an_entry_and_the_next_one_finds_the_child_warm(host, make_task) -> None:
    """The update is in the outbox; the second job is done by the same process, without importing torch again."""
    host.do(host.train(make_task(round=1)))
    pid = host.pid
    host.do(host.train(make_task(round=2)))
    assert host.pid == pid
    assert [(entry.update.round, entry.update.failure) for entry in host.outbox.entries()] == [(1, None), (2, None)]
    entry = host.outbox.entries()[1]
    assert entry.payload.stat().st_size == entry.update.params.size
    assert entry.update.cost.compute_s > 0
    assert entry.update.cost.cpu_s > 0


def test_a_failed_job_tells_its_cause_and_the_child_stays(host, make_task) -> None:
    """A cause of our own, and one of torch's: neither costs the child."""
    host.do(host.train(make_task(round=1)))
    pid = host.pid
    with pytest.raises(TaskFailed, match=naming("ConfigError", "'fedmagic'")):
        host.do(host.train(make_task(round=2, algorithm=Spec(name="fedmagic"))))
    with pytest.raises(TaskFailed, match="shape"):
        host.do(host.train(make_task(round=3, model=Spec(name="mlp", options={"features": 5, "hidden": 8}))))
    host.do(host.train(make_task(round=4)))
    assert host.pid == pid
    assert [entry.update.round for entry in host.outbox.entries()] == [1, 4]


def test_a_cancelled_job_is_given_up_at_once_and_the_child_stays_usable(host, make_task) -> None:
    """No update is left; the same process does the next job."""

    async def story() -> None:
        training = await host.begin(make_task(assignment=ENDLESS))
        pid = host.pid
        began = time.monotonic()
        training.cancel()
        await asyncio.wait({training})
        assert training.cancelled()
        assert time.monotonic() - began < 60.0
        assert 1 not in host.rounds
        await host.train(make_task(round=2))
        assert host.pid == pid

    host.do(story())


def test_a_child_that_dies_while_its_job_is_given_up_is_no_error_of_the_agent_s(host, make_task) -> None:
    """Stopped so that it cannot answer the word to give up, then killed: the call ends as cancelled, not by a fault."""

    async def story() -> None:
        training = await host.begin(make_task(assignment=ENDLESS))
        pid = host.pid
        os.kill(pid, signal.SIGSTOP)
        training.cancel()
        await asyncio.sleep(0.1)
        assert not training.done()
        os.kill(pid, signal.SIGKILL)
        await asyncio.wait({training})
        assert training.cancelled()

    host.do(story())


def test_a_killed_child_has_done_nothing_and_the_same_task_may_be_tried_again(host, make_task) -> None:
    """`kill -9` in the middle of training: the error says that it died and of what; a new child does the next job."""

    async def story() -> None:
        training = await host.begin(make_task(assignment=ENDLESS))
        pid = host.pid
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(TrainerDied, match="signal 9"):
            await training
        assert 1 not in host.rounds
        await host.train(make_task(round=2))
        assert host.pid != pid
        assert 2 in host.rounds

    host.do(story(), 2 * START_S)


def test_a_child_killed_between_jobs_costs_nothing(host, make_task) -> None:
    """The next job starts another one; no task fails for it."""

    async def story() -> None:
        await host.train(make_task(round=1))
        before = host.pid
        os.kill(before, signal.SIGKILL)
        await until(lambda: not host.pid)
        await host.train(make_task(round=2))
        assert host.pid not in (0, before)

    host.do(story(), 2 * START_S)


def test_an_idle_child_is_ended_and_its_lock_is_free(host, make_task) -> None:
    """Idle seconds are counted after a job, never during one."""

    async def story() -> None:
        await host.train(make_task(round=1))
        pid = host.pid
        host.trainer.idle_s = 0.5
        training = asyncio.create_task(host.train(make_task(round=2, assignment=ENDLESS)))
        await asyncio.sleep(1.0)
        assert is_alive(pid)
        training.cancel()
        await asyncio.wait({training})
        assert is_alive(pid)
        await until(lambda: not is_alive(pid) and not is_locked(host.trainer.lock))

    try:
        host.do(story())
    finally:
        host.trainer.idle_s = 600.0
