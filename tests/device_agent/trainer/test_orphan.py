"""The agent is killed while its trainer trains: it finishes, its update counts, and nobody trains beside it."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import msgspec
import psutil

from device_agent.exchange.outbox import Outbox
from device_agent.trainer.process import TrainerOptions, TrainerProcess
from shared.protocol.messages import Assignment, Hyper
from tests.device_agent.agent_side import is_locked, until

AGENT = """
import asyncio, sys
from pathlib import Path
import msgspec
from device_agent.trainer.interface import Job
from device_agent.trainer.process import TrainerOptions, TrainerProcess

async def main(lock, warming, job):
    trainer = TrainerProcess(Path(lock), 600.0, TrainerOptions(threads=1))
    await trainer(warming)
    print(trainer._process.pid, flush=True)
    await trainer(job)

warming, job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=tuple[Job, Job])
asyncio.run(main(sys.argv[1], warming, job))
"""
"""As much of an agent as holds a trainer; a program of its own, so that it can be killed."""


async def test_a_trainer_finishes_the_task_of_a_killed_agent(tmp_path: Path, make_job, make_task) -> None:
    """`kill -9` of the agent: the child trains on, commits and exits; a new agent waits for it and has the update.

    The new agent opens the outbox at its start, while the old child still writes there.
    """
    folders = tmp_path / "outbox", tmp_path / "state"
    box = Outbox(*folders)
    long = Assignment(seed=1, hyper=Hyper(local_epochs=3000, batch_size=8, learning_rate=0.001))
    warming, task = make_task(run="warming"), make_task(assignment=long)
    drafts = [folders[0] / f".{one.run}@000001" for one in (warming, task)]
    for draft in drafts:
        draft.mkdir()
    jobs = [make_job(one, draft) for one, draft in zip((warming, task), drafts, strict=True)]
    assert box.entries() == []
    agent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", AGENT, str(tmp_path / "lock")), stdin=PIPE, stdout=PIPE
    )
    agent.stdin.write(msgspec.msgpack.encode(jobs))
    agent.stdin.close()
    trainer_pid = int(await agent.stdout.readline())
    trainer = psutil.Process(trainer_pid)
    before_s = trainer.cpu_times().user
    await until(lambda: trainer.cpu_times().user >= before_s + 0.1)  # it trains
    trainer.suspend()  # else it might have ended by the time that we look
    agent.kill()
    assert await agent.wait() == -signal.SIGKILL
    successor, its_box = TrainerProcess(tmp_path / "lock", 600.0, TrainerOptions(threads=1)), Outbox(*folders)
    assert is_locked(tmp_path / "lock")
    assert not its_box.has("trial", 1, b"")
    waiting = asyncio.create_task(successor.ready())
    await asyncio.sleep(0.1)
    assert not waiting.done()
    trainer.resume()
    await waiting
    (entry,) = [entry for entry in its_box.entries() if entry.update.run == "trial"]
    assert (entry.update.round, entry.update.failure, entry.update.num_examples) == (1, None, 30)
    assert entry.payload.stat().st_size == entry.update.params.size
    await successor.close()
    await _gone(trainer_pid)


async def test_a_trainer_without_a_task_ends_with_its_agent(tmp_path: Path) -> None:
    """`kill -9` of the agent while its child has nothing to do: the child does not stay."""
    agent = """
import asyncio, sys
from pathlib import Path
from device_agent.trainer.process import TrainerOptions, TrainerProcess

async def main():
    trainer = TrainerProcess(Path(sys.argv[1]), 600.0, TrainerOptions(threads=1))
    await trainer.ready()
    print(trainer._process.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(*(sys.executable, "-c", agent, str(tmp_path / "lock")), stdout=PIPE)
    trainer_pid = int(await process.stdout.readline())
    process.kill()
    await process.wait()
    await _gone(trainer_pid)


async def _gone(pid: int) -> None:
    """Wait for the end of a process that is no child of ours; one that only waits to be noticed has ended."""
    async with asyncio.timeout(300):
        while _state(pid) not in ("", "Z"):  # noqa: ASYNC110 - no child of ours, so that nothing tells
            await asyncio.sleep(0.05)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
