"""Run the trainer process: jobs come in on standard input, answers go out on standard output."""

from __future__ import annotations

import argparse
import fcntl
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, BinaryIO

import msgspec

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
from shared import registry
from shared.errors import ConfigError, FieldFleetError, Superseded, escape_text
from shared.protocol.messages import Missed
from shared.runtime import malloc, memory, processes
from shared.runtime.cpus import count_usable_cpus
from shared.runtime.processes import loading

if TYPE_CHECKING:
    from device_agent.measurement.task_meter import ProcessMeter
    from device_agent.trainer.workspace import Workspace

EXIT_GARBLED = 70
PIPE_BYTES = 1 << 20
"""What a pipe may hold, instead of 64 KiB: a split step's payloads pass with a quarter less of the agent's time."""

logger = logging.getLogger("trainer")


class AgentGone(Exception):
    """Nobody is left to exchange a step with."""


class MessageReader:
    """Reads jobs, and answers to their steps, while the main thread trains; notices at once when a job is given up.

    Attributes:
        jobs: In order; None when the agent is gone.
        answers: To the steps of the job under way; None when there will be no more.
        cancelled: Whether that job is given up.
        carried: Bytes of frames that its steps took so far, up and down.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[memoryview | Missed | None] = queue.SimpleQueue()
        self.cancelled = threading.Event()
        self.carried: tuple[int, int] | None = None

    def start(self) -> None:
        """Read in a thread of its own."""
        threading.Thread(target=self.run, name="message reader", daemon=True).start()

    def run(self) -> None:
        """Read until the agent is gone; a job under way is still finished then. What is no message ends the process."""
        try:
            while (message := self._read_message()) is not None and self._handle(message):
                pass
        except msgspec.DecodeError as error:
            logger.critical("the agent sent what is no message: %s; ending", error)
            os._exit(EXIT_GARBLED)  # from a thread nothing less would; the main thread may be deep in a library
        self.answers.put(None)
        self.jobs.put(None)

    def _handle(self, message: ToTrainer) -> bool:
        """Do what a message says; tell whether it was whole."""
        match message:
            case Start(job=job):
                self.cancelled.clear()
                self.answers, self.carried = queue.SimpleQueue(), None
                self.jobs.put(job)
            case Answer(size=size, carried=carried):
                data = memoryview(bytearray(size))
                if self._stream.readinto(data) < size:  # type: ignore[attr-defined]
                    return False
                self.carried = carried
                self.answers.put(data)
            case Skipped(steps=steps, carried=carried):
                self.carried = carried
                self.answers.put(Missed(steps))
            case Cancel():
                self.cancelled.set()
                self.answers.put(None)
        return True

    def _read_message(self) -> ToTrainer | None:
        """Return the next message; None where the agent closed its end, be it in the middle of one."""
        head = self._stream.read(HEAD_BYTES)
        size = int.from_bytes(head, "little")
        data = self._stream.read(size) if len(head) == HEAD_BYTES else b""
        if len(head) < HEAD_BYTES or len(data) < size:
            return None
        message: ToTrainer = msgspec.msgpack.decode(data, type=ToTrainer)
        return message

    def wait_for_answer(self) -> memoryview | Missed:
        """Wait for the answer to a step.

        Raises:
            Superseded: The job is given up.
            AgentGone: There will be none.
        """
        answer = self.answers.get()
        if answer is not None:
            return answer
        if self.cancelled.is_set():
            raise Superseded("a newer task has come")
        raise AgentGone


@dataclass(frozen=True)
class PipeExchange:
    """Exchanges the steps of a split training through the agent's pipes.

    Attributes:
        reader: Of what comes from the agent.
        out: The pipe to it.
    """

    reader: MessageReader
    out: BinaryIO

    @property
    def carried(self) -> tuple[int, int] | None:
        """Bytes of frames that the job's steps took so far, up and down."""
        return self.reader.carried

    def __call__(self, step: int, parts: Sequence[memoryview]) -> memoryview | Missed:
        """Return the server's payload for a step's.

        Raises:
            Superseded: The job is given up.
            AgentGone: The step cannot be exchanged any more.
        """
        message = Step(step, sum(part.nbytes for part in parts))
        try:
            for data in (memoryview(frame(message)), *parts):
                remaining = data.cast("B")
                while remaining:
                    remaining = remaining[self.out.write(remaining) :]
        except BrokenPipeError as error:
            raise AgentGone from error
        return self.reader.wait_for_answer()


def main() -> None:
    """Serve jobs until the agent is gone."""
    parser = argparse.ArgumentParser(prog="device_agent.trainer.main", description=__doc__)
    parser.add_argument("--lock", type=Path, help="whose lock it was born with; tells people which device's it is")
    parser.add_argument("--memory-mb", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--light", action="store_true", help="evaluate by ONNX Runtime alone, and never load torch")
    parser.add_argument("--nice", type=int, default=0)
    parser.add_argument("--cpus", type=int, nargs="*", default=[])
    parser.add_argument("--log-level", default="warning")
    parser.add_argument("--models", nargs="*", default=[])
    options = parser.parse_args()
    processes.configure(options.log_level)
    processes.end_on_thread_failure()
    _limit_cpu_use(options.nice, options.cpus)
    registry.allow(options.models)
    logger.debug("phase importing pid=%d", os.getpid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the agent decides
    for end in (0, 1):
        with suppress(OSError):  # a user who has many wide ones already gets no more
            fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints must not get between the answers
    limit = options.memory_mb << 20 or memory.default_limit()
    memory.limit_data(limit)
    memory.prefer_oom_kill()
    reader = MessageReader(sys.stdin.buffer)
    reader.start()
    if options.light:
        serve_evaluations(reader, out, options.threads)
    else:
        serve(reader, out, options.threads, (options.device, limit))


def _limit_cpu_use(nice: int, cpus: Sequence[int]) -> None:
    """Leave the processor to others, as this process and its threads to come are told; before torch counts CPUs.

    Args:
        nice: Value, where this process has a lower one.
        cpus: Numbers of those to run on; empty for all.
    """
    try:
        if nice > os.getpriority(os.PRIO_PROCESS, 0):
            os.setpriority(os.PRIO_PROCESS, 0, nice)
        if cpus:
            os.sched_setaffinity(0, cpus)
    except OSError as error:
        logger.warning("nice %d, CPUs %s: the system refuses: %s; training goes on", nice, cpus, error.strerror)


def serve(reader: MessageReader, out: BinaryIO, threads: int, device: tuple[str, int] = ("cpu", 0)) -> None:
    """Do jobs in order. Torch is imported here, while the parameters of the first task are still on their way.

    Args:
        reader: Brings jobs and answers.
        out: The pipe to the agent.
        threads: Torch's, 0 for as many as are fastest.
        device: What to compute with, and how much memory there is to take: as `choose_device`.
    """
    malloc.enable_huge_pages()
    with loading():
        from device_agent.trainer.task import TrainingTask, perform_task  # noqa: PLC0415 - heavy, and not always needed
        from shared.tensors.placement import is_broken, share_memory  # noqa: PLC0415

        workspace = _prepare_workspace(threads, *device)
    exchange = PipeExchange(reader, out)

    def do(job: Job, meter: ProcessMeter) -> None:
        share_memory(workspace().device, device[1], memory.resident_bytes())
        training = TrainingTask(job, workspace(), meter.task, reader.cancelled.is_set)
        frees = training.algorithm.resources.frees_memory
        malloc.tune(*(malloc.LARGE_BYTES, malloc.RETAINED_BYTES) if frees else malloc.STEPS)
        perform_task(training, exchange=exchange)

    _do_jobs(reader, out, do, is_broken)


def serve_evaluations(reader: MessageReader, out: BinaryIO, threads: int) -> None:
    """Do jobs in order that ONNX Runtime evaluates; any other fails, as does every one where it is not installed.

    Args:
        out: The pipe to the agent.
        threads: ONNX Runtime's, 0 for one.
    """

    def do(job: Job, meter: ProcessMeter) -> None:
        from device_agent.trainer.evaluation import TaskMonitor, evaluate_by_graph, read_examples  # noqa: PLC0415

        evaluate_by_graph(job, read_examples, TaskMonitor(meter.task, reader.cancelled.is_set, threads))

    _do_jobs(reader, out, do, lambda _error: False)


def _do_jobs(
    reader: MessageReader,
    out: BinaryIO,
    do: Callable[[Job, ProcessMeter], None],
    is_broken: Callable[[BaseException], bool],
) -> None:
    """Do jobs until the agent is gone, or an error has left the process of no more use."""
    from device_agent.exchange import outbox  # noqa: PLC0415 - nothing heavy before it is known to be needed
    from device_agent.measurement.board import Meters  # noqa: PLC0415

    meters, broken = Meters(), False
    logger.debug("phase idle")
    while not broken and (job := reader.jobs.get()) is not None:  # else the agent starts another process
        answer: FromTrainer = Done()
        phase = "training" if job.task.train else "evaluating", job.task.run, job.task.round
        logger.debug("phase %s run=%s round=%d", *phase)
        try:
            do(job, meters.meter_for(job.measuring, job.cost.idle_w))
            logger.debug("phase committing")
            outbox.commit(Path(job.draft))
            logger.debug("phase committed")
        except Superseded:
            answer = Failed("superseded")
            logger.debug("phase failed")
        except (FieldFleetError, MemoryError, *registry.FAULTS) as error:
            answer, broken = Failed(_describe_failure(error, job)), is_broken(error)
            logger.debug("phase failed")
        except AgentGone:
            return  # in the middle of a split session; whoever comes after it begins the task anew
        try:
            out.write(frame(answer))
        except BrokenPipeError:
            return  # the agent is gone; what was finished is in its outbox
        logger.debug("phase idle")


def _prepare_workspace(threads: int, device: str, limit: int) -> Callable[[], Workspace]:
    """Have torch ready; return what gives the workspace, or raises ConfigError for every task that asks for it."""
    import torch  # noqa: PLC0415

    from device_agent.trainer.threads import Threads  # noqa: PLC0415
    from device_agent.trainer.workspace import Workspace  # noqa: PLC0415
    from shared.tensors.placement import choose_device  # noqa: PLC0415

    tuner = None if threads else Threads(count_usable_cpus(), torch.set_num_threads, perf_counter)
    torch.set_num_threads(threads or count_usable_cpus())
    workspace = cache(lambda: Workspace(device=choose_device(device, limit), threads=tuner))
    with suppress(ConfigError):
        workspace()
    return workspace


def _describe_failure(error: Exception, job: Job) -> str:
    """Return what the server is told of an error, and log it; where in the code a disk was full helps nobody.

    It asks no more for what an operator must edit, but a file that is away may come back.
    """
    logger.warning("job failed: %s", error, exc_info=not isinstance(error, FieldFleetError | OSError))
    if isinstance(error, MemoryError) or "allocate memory" in str(error) or "Cannot allocate" in str(error):
        return f"out of memory: {escape_text(str(error))}; raise trainer.memory_mb or use a smaller model or batch"
    is_away = isinstance(error, ConfigError) and job.data.path and not Path(job.data.path).exists()
    return escape_text(f"{'TaskFailed' if is_away else type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
