"""The trainer's own process: what comes through its pipe, and the lock it is born with."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from device_agent.trainer.interface import Answer, Cancel, Start, frame
from device_agent.trainer.main import EXIT_GARBLED, MessageReader
from device_agent.trainer.process import TrainerOptions, TrainerProcess
from shared.runtime.processes import EXIT_THREAD
from tests.device_agent.agent_side import is_locked, until

LIMIT_S = 300.0


def test_messages_come_whole_and_in_order(make_job, make_task, tmp_path) -> None:
    jobs = [make_job(make_task(round=number), tmp_path) for number in (1, 2)]
    reader = MessageReader(
        io.BytesIO(frame(Start(jobs[0])) + frame(Cancel()) + frame(Start(jobs[1])) + frame(Cancel()))
    )
    reader.run()
    assert [reader.jobs.get() for _ in range(3)] == [*jobs, None]
    assert reader.cancelled.is_set()


def test_an_agent_that_dies_in_the_middle_of_a_message_is_gone_and_no_fault(make_job, make_task, tmp_path) -> None:
    """Cut at every byte: the job before it is kept, the half one is not a job, and nothing waits for ever."""
    job = make_job(make_task(), tmp_path)
    whole = frame(Start(job))
    for cut in range(len(whole)):
        reader = MessageReader(io.BytesIO(whole + whole[:cut]))
        reader.run()
        assert [reader.jobs.get(), reader.jobs.get()] == [job, None]
        assert reader.jobs.empty()


async def test_an_error_in_the_reader_ends_the_process_and_says_so(tmp_path: Path) -> None:
    """An answer for which there is no memory; the trainer would read no more and the server wait for its deadline."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "device_agent.trainer.main", "--lock", str(tmp_path / "lock")),
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
    )
    process.stdin.write(frame(Answer(step=1, size=1 << 60, carried=(0, 0))))
    said = (await process.stderr.read()).decode()
    assert await process.wait() == EXIT_THREAD
    assert "'message reader'" in said


@pytest.mark.parametrize(
    "data", [b"\xc1", b"\x80", b"\x81\xa4type\xa5Dance", b""], ids=["garbage", "no type", "unknown", "empty"]
)
async def test_what_is_no_message_ends_the_process_and_says_so(tmp_path: Path, data: bytes) -> None:
    """At once, its input still open, instead of a trainer that listens no more and never answers."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "device_agent.trainer.main", "--lock", str(tmp_path / "lock")),
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
    )
    process.stdin.write(len(data).to_bytes(4, "little") + data)
    said = (await process.stderr.read()).decode()
    assert await process.wait() == EXIT_GARBLED
    assert "CRITICAL" in said


async def test_the_lock_is_held_from_before_the_child_runs_until_its_end(tmp_path: Path) -> None:
    """Stopped before it has run a line of ours, it holds the lock: no second one can begin in between."""
    trainer = TrainerProcess(tmp_path / "lock", 600.0, TrainerOptions(threads=1))
    await trainer.ready()
    pid = trainer.pid
    os.kill(pid, signal.SIGSTOP)
    successor = TrainerProcess(tmp_path / "lock", 600.0, TrainerOptions(threads=1))
    try:
        assert is_locked(trainer.lock)
        waiting = asyncio.create_task(successor.ready())
        await asyncio.sleep(0.5)
        assert not waiting.done()
    finally:
        os.kill(pid, signal.SIGKILL)
    await waiting
    assert successor.pid != pid
    await successor.close()
    await until(lambda: not is_locked(trainer.lock))
    await trainer.close()
