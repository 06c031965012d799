"""A trainer with its real child process, driven as the agent drives it."""

from __future__ import annotations

import asyncio
import fcntl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from device_agent.exchange.outbox import Outbox
from device_agent.trainer.process import TrainerProcess
from shared.protocol.messages import Assignment, Hyper, Task

ENDLESS = Assignment(seed=1, hyper=Hyper(local_epochs=1_000_000_000, batch_size=8, learning_rate=0.001))
START_S = 60.0
"""To import torch on a busy machine."""


@dataclass
class Host:
    """An event loop that lasts for all tests, and the trainer on it."""

    runner: asyncio.Runner
    trainer: TrainerProcess
    outbox: Outbox
    make_job: Callable

    def do(self, routine, limit_s: float = START_S):
        return self.runner.run(asyncio.wait_for(routine, limit_s))

    async def train(self, task: Task) -> float:
        """Do a task as the agent does; return the seconds it took."""
        began = time.monotonic()
        draft = self.outbox.draft(task.run, task.round)
        await self.trainer(self.make_job(task, draft))
        self.outbox.commit(draft)
        return time.monotonic() - began

    async def begin(self, task: Task) -> asyncio.Task[float]:
        """Begin a task that never ends by itself, in a child that is warm; return while it trains."""
        await self.train(msgspec.structs.replace(task, round=0, assignment=Assignment(seed=1, hyper=Hyper())))
        training = asyncio.create_task(self.train(task))
        await asyncio.sleep(0.3)
        assert not training.done()
        return training

    @property
    def rounds(self) -> list[int]:
        """Rounds whose updates wait in the outbox."""
        return [entry.update.round for entry in self.outbox.entries()]

    @property
    def pid(self) -> int:
        return self.trainer._process.pid


def is_alive(pid: int) -> bool:
    """Tell whether a process runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def is_locked(path: Path) -> bool:
    """Tell whether a living trainer holds its lock."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


async def until(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - what a process does sets no event here
            await asyncio.sleep(0.02)
