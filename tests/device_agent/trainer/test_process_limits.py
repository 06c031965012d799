"""The trainer with its real child process: starved of memory, never given a job, ended early."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from device_agent.exchange.outbox import Outbox
from device_agent.trainer.process import TrainerOptions, TrainerProcess
from shared.errors import TaskFailed, TrainerDied
from shared.protocol.messages import Assignment, Hyper, Spec, Transfer
from shared.runtime.memory import default_limit
from tests.device_agent.agent_side import START_S, Host, is_alive, until


async def test_a_child_made_ready_for_a_task_that_never_came_is_ended_too(tmp_path) -> None:
    """The parameters could not be fetched: the child that was started meanwhile does not hold memory for ever."""
    trainer = TrainerProcess(tmp_path / "lock", 0.4, TrainerOptions(threads=1))
    await trainer.ready()
    pid = trainer.pid
    assert is_alive(pid)
    await until(lambda: not is_alive(pid))
    await trainer.close()


async def test_closing_ends_the_child_also_when_it_is_busy(tmp_path) -> None:
    """At any moment, here while it imports torch; twice is harmless."""
    trainer = TrainerProcess(tmp_path / "lock", 600.0, TrainerOptions(threads=1))
    await trainer.ready()
    pid = trainer.pid
    await asyncio.sleep(0.5)
    began = time.monotonic()
    await trainer.close()
    assert time.monotonic() - began < 60.0
    assert not is_alive(pid)
    await trainer.close()


async def test_a_model_too_large_for_the_limit_is_out_of_memory_and_no_more(tmp_path, make_job, make_task) -> None:
    """2 GB of parameters under a limit of 1 GB: the task fails with the cause and the remedy; a small one works.

    With a method that leaves the parameters to the device, so that no shape is wrong.
    """
    large = Spec(name="mlp", options={"features": 4, "hidden": 80_000_000, "classes": 2})
    trainer = TrainerProcess(tmp_path / "lock", 60.0, TrainerOptions(memory_mb=1024, threads=1))
    host = Host(None, trainer, Outbox(tmp_path / "outbox", tmp_path / "state"), make_job)
    with pytest.raises(TaskFailed, match=r"trainer\.memory_mb"):
        await host.train(make_task(round=1, model=large, algorithm=Spec(name="local_only")))
    await host.train(make_task(round=2))
    assert [entry.update.round for entry in host.outbox.entries()] == [2]
    await trainer.close()


def data_limit(pid: int) -> str:
    """Return the soft limit of a process's data, as the system words it."""
    return Path(f"/proc/{pid}/limits").read_text().partition("Max data size")[2].split()[0]


async def test_a_trainer_takes_four_fifths_of_the_board_at_most(tmp_path) -> None:
    """Unless its file says otherwise: a server that asks for more does not take the board down."""
    found = []
    for memory_mb in (0, 1234):
        trainer = TrainerProcess(tmp_path / "lock", 60.0, TrainerOptions(memory_mb=memory_mb, threads=1))
        await trainer.ready()
        host = Host(None, trainer, Outbox(tmp_path / "outbox", tmp_path / "state"), None)
        await until(lambda pid=host.pid: data_limit(pid).isdigit(), START_S)
        found.append(int(data_limit(host.pid)))
        await trainer.close()
    usual, given = found
    assert given == 1234 << 20
    assert usual == default_limit() <= 0.8 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


async def test_a_limit_too_small_for_torch_itself_fails_the_task(tmp_path, make_job, make_task) -> None:
    """The child dies while it imports; the agent hears of it, and can try again."""
    trainer = TrainerProcess(tmp_path / "lock", 60.0, TrainerOptions(memory_mb=64, threads=1))
    host = Host(None, trainer, Outbox(tmp_path / "outbox", tmp_path / "state"), make_job)
    for number in (1, 2):
        with pytest.raises(TrainerDied):
            await host.train(make_task(round=number))
    assert host.outbox.entries() == []
    await trainer.close()


async def test_it_gives_way_as_it_is_told(tmp_path, make_task) -> None:
    """By a priority and a CPU; of a CPU that is not there comes a warning and no more."""
    present = os.sched_getaffinity(0)
    last = max(present)
    graph = Transfer(digest="0" * 64, size=1, frame_bytes=1)
    task = make_task(train=False, evaluate=True, assignment=Assignment(seed=1, hyper=Hyper(), graph=graph))
    for cpus, expected in ([last], {last}), ([1023], present):
        trainer = TrainerProcess(tmp_path / "lock", 60.0, TrainerOptions(threads=1, nice=19, cpus=cpus))
        await trainer.ready(task)
        pid = trainer.pid
        await until(lambda pid=pid: data_limit(pid).isdigit(), START_S)  # which comes after it
        assert os.getpriority(os.PRIO_PROCESS, pid) == 19
        assert os.sched_getaffinity(pid) == expected
        await trainer.close()
