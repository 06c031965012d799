"""Supervise the trainer child process and exchange messages with it.

The child starts for the first task, stays warm between rounds, and is ended when idle. If it dies, the cause is
reported and the next job starts another. It outlives a killed agent until its task is done: the lock shows this, and
its update is in the outbox.
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
from device_agent.projects.provide import Projects, ProvidedProject
from device_agent.trainer.interface import (
    HEAD_BYTES,
    Answer,
    Cancel,
    Done,
    Failed,
    FromTrainer,
    Job,
    Skipped,
    Start,
    Step,
    ToTrainer,
    frame,
)
from shared.errors import ConfigError, TaskFailed, TrainerDied
from shared.protocol.messages import Missed, Task
from shared.runtime.executor import BackgroundTasks
from shared.runtime.interpreter import find_interpreter
from shared.runtime.processes import wait_or_kill

log = logging.getLogger(__name__)

LOCK_POLL_S = 0.1
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
"""Default environment of the trainer: waiting threads of GNU's and Intel's OpenMP sleep instead of spinning. It is read
when torch is loaded."""
NO_TORCH = (
    "ConfigError: this board has no torch, or its trainer.trains is false: it only evaluates, in plans with "
    'evaluation.runtime = "onnx"'
)


class Conversation:
    """The agent's side of one job: messages, and the payloads of split steps.

    Args:
        exchange: Exchanges split steps with the server; None for other jobs.

    Attributes:
        error: The failed exchange that cancelled the job, if any.
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
        """Cancel the job in the child; `run` still returns its final message."""
        self._cancelled = True
        self.send(Cancel())
        if self._exchanging:
            self._exchanging.cancel()

    async def run(self) -> Done | Failed | None:
        """Exchange the child's steps until its final message; None if it died first."""
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
        """Exchange a step with the server, unless the job is cancelled or the child dies meanwhile."""
        if self._exchange is None:
            self.error = TaskFailed("the training exchanges steps with the server, but the task has no split session")
            self.give_up()
            return
        exchanging = self._exchanging = asyncio.ensure_future(self._exchange(step, [memoryview(data)]))
        dying = asyncio.ensure_future(self._process.wait())
        try:
            await asyncio.wait({exchanging, dying}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            dying.cancel()
            exchanging.cancel()  # the answer is useless if the child is dead
            await asyncio.wait({exchanging})
        if exchanging.cancelled():
            return
        if error := exchanging.exception():
            self.error = error
            self.give_up()
            return
        answer, carried = exchanging.result(), self._exchange.bytes_so_far
        if isinstance(answer, Missed):
            self.send(Skipped(answer.steps, carried))
        else:
            self.send(Answer(step, answer.nbytes, carried))
            self._in.write(answer)
        await self._in.drain()


@dataclass(frozen=True)
class TrainerOptions:
    """Options of the child's command line.

    Attributes:
        memory_mb: Memory limit in MiB; 0 for none.
        threads: Threads of torch; 0 to choose the fastest number by timing.
        log_level: Level of the child's log on the agent's standard error.
        plugins: Plugins that the child may import.
        device: Torch device: `auto`, `cpu` or `cuda`.
        nice: Minimum nice value of the child.
        cpus: CPU numbers that the child may run on; empty for all.
        python: Interpreter; empty for that of `device-agent setup`, else the agent's.
    """

    memory_mb: int = 0
    threads: int = 0
    log_level: str = "warning"
    plugins: Sequence[str] = ()
    device: str = "cpu"
    nice: int = 0
    cpus: Sequence[int] = ()
    python: str = ""

    def arguments(self) -> list[object]:
        """Return the arguments of the child's command."""
        arguments: list[object] = ["--memory-mb", self.memory_mb, "--threads", self.threads, "--device", self.device]
        arguments += ["--nice", self.nice, "--cpus", *self.cpus]
        return [*arguments, "--log-level", self.log_level, "--plugins", *self.plugins]


@dataclass
class TrainerProcess:
    """Runs jobs in a child process that stays warm between them.

    Attributes:
        lock: File that a living trainer holds locked; inherited at start, since the agent may die at any time.
        idle_s: Seconds without a job after which the child is ended.
        trains: False to refuse jobs that need torch.
        projects: Provides the code of a task's project, on the path of this child alone; None for no projects.
    """

    lock: Path
    idle_s: float
    options: TrainerOptions
    trains: bool = True
    projects: Projects | None = None
    _provided: tuple[ProvidedProject, ...] = ()
    _is_light: bool = False
    _process: Process | None = None
    _idle: asyncio.TimerHandle | None = None
    _ending: BackgroundTasks = field(default_factory=BackgroundTasks)

    @property
    def pid(self) -> int:
        """Process id of the child; 0 without one."""
        return self._process.pid if self._process and self._process.returncode is None else 0

    async def ready(self, task: Task | None = None, /) -> None:
        """Wait for a trainer that an earlier agent left behind, start a child if needed, and restart the idle timer.

        A task that only needs ONNX Runtime is done by the current child, or else by a light one without torch, which
        is replaced at the next task that trains.

        Raises:
            TaskFailed: The board does not train, lacks the interpreter, or cannot have the task's project.
        """
        self._stop_idle_timer()
        light = task is not None and task.assignment.graph is not None
        if not light and not self.trains:
            raise TaskFailed(NO_TORCH)
        provided = await self._provide(task)
        if (self._is_light and not light) or provided != self._provided:
            self._end_process()
        self._provided = provided
        if not self._process or self._process.returncode is not None:
            await self._start(light=light)
        self._start_idle_timer()

    async def _provide(self, task: Task | None) -> tuple[ProvidedProject, ...]:
        """Return the projects of a task; those of the current child if no task is given."""
        if task is None:
            return self._provided
        if self.projects is not None:
            return await self.projects.provide_for_task(task.project)
        if task.project:
            raise TaskFailed(f"ConfigError: project {task.project.name!r}: this board uses no projects")
        return ()

    async def _start(self, *, light: bool) -> None:
        try:
            interpreter = find_interpreter(self.options.python)
        except ConfigError as error:
            raise TaskFailed(f"ConfigError: {error}") from error
        waited = False
        while (lock := _acquire(self.lock)) is None:
            if not waited:
                log.info("waiting for a trainer that an earlier agent started")
            waited = True
            await asyncio.sleep(LOCK_POLL_S)
        arguments = ["--lock", self.lock, *["--light"] * light, *self.options.arguments()]
        for project in self._provided:
            arguments += ["--project", project.name, project.folder]
        try:
            self._process = await asyncio.create_subprocess_exec(
                *interpreter.command("device_agent.trainer.main", *map(str, arguments)),
                stdin=PIPE,
                stdout=PIPE,
                env=interpreter.environment(PASSIVE),
                start_new_session=True,
                pass_fds=[lock],  # inherited, so that the lock is never free in between
            )
        finally:
            os.close(lock)
        self._is_light = light
        log.info("%s started pid=%d", "evaluator" if light else "trainer", self._process.pid)

    async def __call__(self, job: Job, exchange: Exchange | None = None) -> None:
        """Perform a job in the child; cancelling this call cancels the job.

        Raises:
            TaskFailed: The job failed.
            TrainerDied: The child ended first; an update that it committed is in the outbox.
            SessionLost: The split session broke.
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
            await asyncio.wait({conversing})  # the child still uses the job's files and the pipe
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
        """Return the child's final message, or its cause of death."""
        return await conversation.run() or TrainerDied(await self._describe_exit(process))

    async def _describe_exit(self, process: Process) -> str:
        code = await process.wait()
        if self._process is process:
            self._process = None
        if code == -signal.SIGKILL:
            return "the trainer was killed (signal 9): out of memory, or by hand"
        if code < 0:
            return f"the trainer died of signal {-code} ({signal.Signals(-code).name})"
        return f"the trainer ended with exit code {code}; see its last messages in this agent's log"

    async def close(self) -> None:
        """End the child, if there is one, and wait for it."""
        self._end_process()
        await self._ending.wait()

    def _stop_idle_timer(self) -> None:
        if self._idle:
            self._idle.cancel()
            self._idle = None

    def _start_idle_timer(self) -> None:
        """Start the timer that ends an idle child."""

        def end() -> None:
            log.info("trainer idle for %.0f s, ending it", self.idle_s)
            self._end_process()

        self._stop_idle_timer()
        if self._process:
            self._idle = asyncio.get_running_loop().call_later(self.idle_s, end)

    def _end_process(self) -> None:
        """Detach the child, so that it gets no more jobs, and end it in the background."""
        self._stop_idle_timer()
        process, self._process = self._process, None
        if process and process.returncode is None:
            process.terminate()  # even during a task
            self._ending.start(wait_or_kill(process), "end trainer")


def _acquire(path: Path) -> int | None:
    """Lock a file; return its descriptor, or None if another process holds the lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
