"""The trainer as the agent sees it: a child process that does one job at a time.

Started for the first task, kept warm between rounds, ended after an idle time. Its death is told with its cause, and
the next job starts another. It outlives a killed agent for the task it is doing: the lock says so, and its update lies
in the outbox.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import msgspec

from device_agent.job import Job
from shared.errors import TaskFailed, TrainerDied

log = logging.getLogger(__name__)

LOCK_POLL_S = 0.1
EXIT_PATIENCE_S = 5.0


class Done(msgspec.Struct, frozen=True, tag=True):
    """Child -> agent: the update is in the outbox."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Child -> agent: the job could not be done; nothing was written."""

    cause: str


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Agent -> child: give up the job you have."""


class Start(msgspec.Struct, frozen=True, tag=True):
    """Agent -> child: do this job."""

    job: Job


ToTrainer: TypeAlias = Start | Cancel
FromTrainer: TypeAlias = Done | Failed


@dataclass
class TrainerProcess:
    """Owns the child.

    Attributes:
        lock: File that a living trainer holds locked; it inherits the lock, since an agent may die right after it.
        idle_s: Seconds without a job after which the child is ended.
        memory_mb: Its memory limit in MiB, 0 for none.
        threads: Its torch threads, 0 for torch's choice.
        log_level: What it says on the agent's standard error.
    """

    lock: Path
    idle_s: float
    memory_mb: int
    threads: int
    log_level: str = "warning"
    _process: Process | None = None
    _idle: asyncio.TimerHandle | None = None
    _ending: set[asyncio.Task[None]] = field(default_factory=set)

    async def ready(self) -> None:
        """Wait for a trainer that an earlier agent left behind, then start our own; idle seconds count from here."""
        self._stay()
        if not self._process or self._process.returncode is not None:
            await self._start()
        self._leave()

    async def _start(self) -> None:
        waited = False
        while (lock := _taken(self.lock)) is None:
            if not waited:
                log.info("waiting for a trainer that an earlier agent started")
            waited = True
            await asyncio.sleep(LOCK_POLL_S)
        arguments = ["--lock", self.lock, "--memory-mb", self.memory_mb, "--threads", self.threads]
        arguments += ["--log-level", self.log_level]
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "device_agent.trainer_main", *map(str, arguments)),
                stdin=PIPE,
                stdout=PIPE,
                start_new_session=True,
                pass_fds=[lock],  # the child is born with it, so that there is no moment when it is free
            )
        finally:
            os.close(lock)
        log.info("trainer started pid=%d", self._process.pid)

    async def __call__(self, job: Job) -> None:
        """Do a job in the child; a cancelled call makes the child give the job up.

        Raises:
            TaskFailed: The child says so.
            TrainerDied: It ended first; what it committed before is in the outbox all the same.
        """
        await self.ready()
        self._stay()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        process.stdin.write(frame(Start(job)))
        answering = asyncio.ensure_future(self._answer(process))
        try:
            answer = await asyncio.shield(answering)
        except asyncio.CancelledError:
            process.stdin.write(frame(Cancel()))
            await asyncio.wait({answering})  # until then the child uses the job's files, and its pipe is not free
            raise
        finally:
            self._leave()
        if isinstance(answer, TrainerDied):
            raise answer
        if isinstance(answer, Failed):
            raise TaskFailed(answer.cause)

    async def _answer(self, process: Process) -> FromTrainer | TrainerDied:
        """Return what the child says of its job; that it died is an answer too."""
        assert process.stdout
        try:
            size = int.from_bytes(await process.stdout.readexactly(4), "little")
            answer: FromTrainer = msgspec.msgpack.decode(await process.stdout.readexactly(size), type=FromTrainer)
        except (ConnectionError, asyncio.IncompleteReadError):
            return TrainerDied(await self._cause_of_death(process))
        return answer

    async def _cause_of_death(self, process: Process) -> str:
        code = await process.wait()
        if self._process is process:
            self._process = None
        if code == -signal.SIGKILL:
            return "the trainer was killed (signal 9): out of memory, or by hand"
        if code < 0:
            return f"the trainer died of signal {-code} ({signal.Signals(-code).name})"
        return f"the trainer ended with exit code {code}; its last words are in this agent's log"

    async def close(self) -> None:
        """End the child now, if there is one."""
        self._end()
        await asyncio.gather(*self._ending)

    def _stay(self) -> None:
        if self._idle:
            self._idle.cancel()
            self._idle = None

    def _leave(self) -> None:
        """Begin to count idle seconds."""

        def end() -> None:
            log.info("trainer idle for %.0f s, ending it", self.idle_s)
            self._end()

        self._stay()
        if self._process:
            self._idle = asyncio.get_running_loop().call_later(self.idle_s, end)

    def _end(self) -> None:
        """Part with the child at once, so that no job is given to it any more; its end takes its time."""
        self._stay()
        process, self._process = self._process, None
        if process and process.returncode is None:
            process.terminate()
            ending = asyncio.ensure_future(_gone(process))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)


async def _gone(process: Process) -> None:
    """Wait for a process that was told to end; make it, if it does not."""
    try:
        async with asyncio.timeout(EXIT_PATIENCE_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def frame(message: ToTrainer | FromTrainer) -> bytes:
    """Return a message as it goes through the pipe: u32 length, MessagePack."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(4, "little") + data


def _taken(path: Path) -> int | None:
    """Return a descriptor that holds the lock, as long as a process has it open; None while another one does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
