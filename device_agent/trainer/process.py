"""Supervise the trainer, a child process that does one job at a time, and exchange messages with it through pipes.

Started for the first task, kept warm between rounds, ended after an idle time. Its death is reported with its cause,
and the next job starts another. It outlives a killed agent for the task it is doing: the lock says so, and its update
lies in the outbox.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from device_agent.exchange.split_session import Exchange
from device_agent.trainer.interface import Job
from device_agent.trainer.pipe_messages import (
    HEAD_BYTES,
    Answer,
    Cancel,
    Done,
    Failed,
    FromTrainer,
    Skipped,
    Start,
    Step,
    ToTrainer,
    frame,
)
from shared.errors import ConfigError, TaskFailed, TrainerDied
from shared.protocol.messages import Missed, Task
from shared.runtime.interpreter import find_interpreter
from shared.runtime.processes import wait_or_kill

log = logging.getLogger(__name__)

LOCK_POLL_S = 0.1
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
"""Of the trainer's environment, where nobody set them: threads of GNU's and Intel's OpenMP that wait for others sleep
and leave the processor to whoever works. They are read when torch is loaded."""
NO_TORCH = (
    "ConfigError: this board has no torch, or its trainer.trains is false: it only evaluates, in plans with "
    'evaluation.runtime = "onnx"'
)


class Conversation:
    """The agent's side of one job: messages, and the payloads of a split training between.

    Args:
        exchange: How steps reach the server; None where the job has none.

    Attributes:
        error: Why the job was given up, if the exchange of its steps was the reason.
    """

    def __init__(self, process: Process, exchange: Exchange | None) -> None:
        assert process.stdin
        assert process.stdout
        self._process, self._in, self._out, self._exchange = process, process.stdin, process.stdout, exchange
        self._exchanging: asyncio.Future[memoryview | Missed] | None = None
        self._cancelled = False
        self.error: BaseException | None = None

    def send(self, message: ToTrainer) -> None:
        """Write a message to the child."""
        self._in.write(frame(message))

    def give_up(self) -> None:
        """Have the child give the job up; `run` still returns its last word on it."""
        self._cancelled = True
        self.send(Cancel())
        if self._exchanging:
            self._exchanging.cancel()

    async def run(self) -> Done | Failed | None:
        """Exchange the child's steps until it says how its job ended; None where it died first."""
        try:
            while isinstance(message := await self._receive(), Step):
                data = await self._out.readexactly(message.size)
                if not self._cancelled:
                    await self._exchange_step(message.step, data)
        except (ConnectionError, asyncio.IncompleteReadError):
            return None
        return message

    async def _receive(self) -> FromTrainer:
        size = int.from_bytes(await self._out.readexactly(HEAD_BYTES), "little")
        message: FromTrainer = msgspec.msgpack.decode(await self._out.readexactly(size), type=FromTrainer)
        return message

    async def _exchange_step(self, step: int, data: bytes) -> None:
        """Have a step exchanged, unless the job is given up or the child dies meanwhile."""
        if self._exchange is None:
            self.error = TaskFailed("its training takes steps with the server, which the task says nothing of")
            self.give_up()
            return
        exchanging = self._exchanging = asyncio.ensure_future(self._exchange(step, [memoryview(data)]))
        dying = asyncio.ensure_future(self._process.wait())
        try:
            await asyncio.wait({exchanging, dying}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            dying.cancel()
            exchanging.cancel()  # of a step whose child is dead nobody wants the answer
            await asyncio.wait({exchanging})
        if exchanging.cancelled():
            return
        if error := exchanging.exception():
            self.error = error
            self.give_up()
            return
        answer, carried = exchanging.result(), self._exchange.carried
        if isinstance(answer, Missed):
            self.send(Skipped(answer.steps, carried))
        else:
            self.send(Answer(step, answer.nbytes, carried))
            self._in.write(answer)
        await self._in.drain()


@dataclass
class TrainerProcess:
    """Runs jobs in a child process that stays warm between them.

    Attributes:
        lock: File that a living trainer holds locked; it inherits the lock, since an agent may die right after it.
        idle_s: Seconds without a job after which the child is ended.
        memory_mb: Its memory limit in MiB, 0 for none.
        threads: Its torch threads, 0 for as many as are fastest.
        log_level: What it says on the agent's standard error.
        models: Builders of the user's own that it may import.
        device: What it computes with: `auto`, `cpu` or `cuda`.
        trains: Whether it is given jobs that need torch.
        nice: Its nice value, where the agent has a lower one.
        cpus: Numbers of the CPUs that it may run on; empty for all.
        python: Its interpreter; empty for the one that `device-agent setup` brought PyTorch for, or the agent's own.
    """

    lock: Path
    idle_s: float
    memory_mb: int
    threads: int
    log_level: str = "warning"
    models: Sequence[str] = ()
    device: str = "cpu"
    trains: bool = True
    nice: int = 0
    cpus: Sequence[int] = ()
    python: str = ""
    _is_light: bool = False
    _process: Process | None = None
    _idle: asyncio.TimerHandle | None = None
    _ending: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def pid(self) -> int:
        """The child's; 0 while there is none."""
        return self._process.pid if self._process and self._process.returncode is None else 0

    async def ready(self, task: Task | None = None, /) -> None:
        """Wait for a trainer that an earlier agent left behind, then start our own; idle seconds count from here.

        A task of which ONNX Runtime evaluates a graph is done by the process that is there, or else by one that never
        loads torch, which makes way for the next task that trains.

        Raises:
            TaskFailed: The board does not train, or its interpreter is not there.
        """
        self._stop_idle_timer()
        light = task is not None and task.assignment.graph is not None
        if not light and not self.trains:
            raise TaskFailed(NO_TORCH)
        if self._is_light and not light:
            self._end_process()
        if not self._process or self._process.returncode is not None:
            await self._start(light=light)
        self._start_idle_timer()

    async def _start(self, *, light: bool) -> None:
        try:
            interpreter = find_interpreter(self.python)
        except ConfigError as error:
            raise TaskFailed(f"ConfigError: {error}") from error
        waited = False
        while (lock := _acquire(self.lock)) is None:
            if not waited:
                log.info("waiting for a trainer that an earlier agent started")
            waited = True
            await asyncio.sleep(LOCK_POLL_S)
        arguments = ["--lock", self.lock, "--memory-mb", self.memory_mb, "--threads", self.threads]
        arguments += ["--device", self.device, *["--light"] * light]
        arguments += ["--nice", self.nice, "--cpus", *self.cpus]
        arguments += ["--log-level", self.log_level, "--models", *self.models]
        try:
            self._process = await asyncio.create_subprocess_exec(
                *interpreter.command("device_agent.trainer.main", *map(str, arguments)),
                stdin=PIPE,
                stdout=PIPE,
                env=interpreter.environment(PASSIVE),
                start_new_session=True,
                pass_fds=[lock],  # the child is born with it, so that there is no moment when it is free
            )
        finally:
            os.close(lock)
        self._is_light = light
        log.info("%s started pid=%d", "evaluator" if light else "trainer", self._process.pid)

    async def __call__(self, job: Job, exchange: Exchange | None = None) -> None:
        """Do a job in the child; a cancelled call makes the child give the job up.

        Raises:
            TaskFailed: The child says so.
            TrainerDied: It ended first; what it committed before is in the outbox all the same.
            SessionLost: As `exchange` says.
        """
        await self.ready(job.task)
        self._stop_idle_timer()
        process = self._process
        assert process is not None
        conversation = Conversation(process, exchange)
        conversation.send(Start(job))
        conversing = asyncio.ensure_future(self._last_message(process, conversation))
        try:
            answer = await asyncio.shield(conversing)
        except asyncio.CancelledError:
            conversation.give_up()
            await asyncio.wait({conversing})  # until then the child uses the job's files, and its pipe is not free
            raise
        finally:
            self._start_idle_timer()
        if isinstance(answer, TrainerDied):
            raise answer
        if conversation.error:
            raise conversation.error
        if isinstance(answer, Failed):
            raise TaskFailed(answer.cause)

    async def _last_message(self, process: Process, conversation: Conversation) -> Done | Failed | TrainerDied:
        """Return the child's last word on its job; that it died is one too."""
        return await conversation.run() or TrainerDied(await self._describe_exit(process))

    async def _describe_exit(self, process: Process) -> str:
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
        self._end_process()
        await asyncio.gather(*self._ending)

    def _stop_idle_timer(self) -> None:
        if self._idle:
            self._idle.cancel()
            self._idle = None

    def _start_idle_timer(self) -> None:
        """Begin to count idle seconds."""

        def end() -> None:
            log.info("trainer idle for %.0f s, ending it", self.idle_s)
            self._end_process()

        self._stop_idle_timer()
        if self._process:
            self._idle = asyncio.get_running_loop().call_later(self.idle_s, end)

    def _end_process(self) -> None:
        """Part with the child at once, so that no job is given to it any more; its end takes its time."""
        self._stop_idle_timer()
        process, self._process = self._process, None
        if process and process.returncode is None:
            process.terminate()  # at once, whatever becomes of the task
            ending = asyncio.ensure_future(wait_or_kill(process))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)


def _acquire(path: Path) -> int | None:
    """Return a descriptor that holds the lock, as long as a process has it open; None while another one does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
