"""Main program of the trainer: reads jobs from stdin, writes answers to stdout."""

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
from functools import cache, lru_cache
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from device_agent.projects.environment import add_project
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
from shared import registry
from shared.errors import ConfigError, FieldFleetError, Superseded, escape_text
from shared.protocol.messages import Missed, Update
from shared.runtime import malloc, memory, processes
from shared.runtime.cpus import count_usable_cpus
from shared.runtime.phases import log_phase
from shared.runtime.processes import loading

if TYPE_CHECKING:
    from device_agent.measurement.task_meter import ProcessMeter
    from device_agent.trainer.workspace import Workspace

EXIT_GARBLED = 70
PIPE_BYTES = 1 << 20
"""Pipe capacity instead of 64 KiB; it saves a quarter of the agent's CPU time for a split step's payloads."""

logger = logging.getLogger("trainer")


class AgentGone(Exception):
    """The agent has ended during a split training."""


class MessageReader:
    """Reads jobs and answers in a thread while the main thread trains, so that a cancellation takes effect at once.

    Attributes:
        jobs: Received jobs; None once the agent has ended.
        answers: Answers to the steps of the current job; None if no more will come.
        cancelled: Set when the current job is cancelled.
        carried: Bytes of the frames of the current job's steps so far, up and down.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[memoryview | Missed | None] = queue.SimpleQueue()
        self.cancelled = threading.Event()
        self.carried: tuple[int, int] | None = None

    def start(self) -> None:
        """Start the reader thread."""
        threading.Thread(target=self.run, name="message reader", daemon=True).start()

    def run(self) -> None:
        """Read until the agent ends; the current job is still completed. Invalid input ends the process."""
        try:
            while (message := self._read_message()) is not None and self._handle(message):
                pass
        except msgspec.DecodeError as error:
            logger.critical("invalid message from the agent: %s; exiting", error)
            os._exit(EXIT_GARBLED)  # sys.exit would only end this thread
        self.answers.put(None)
        self.jobs.put(None)

    def _handle(self, message: ToTrainer) -> bool:
        """Handle a message; return False if its payload is truncated."""
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
        """Return the next message; None at the end of the stream, also within a message."""
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
            Superseded: The job was cancelled.
            AgentGone: The agent has ended.
        """
        answer = self.answers.get()
        if answer is not None:
            return answer
        if self.cancelled.is_set():
            raise Superseded("a newer task has arrived")
        raise AgentGone


@dataclass(frozen=True)
class PipeExchange:
    """Exchanges the steps of a split training through the agent's pipes."""

    reader: MessageReader
    out: BinaryIO

    @property
    def bytes_so_far(self) -> tuple[int, int] | None:
        """Bytes of the frames of the job's steps so far, up and down."""
        return self.reader.carried

    def __call__(self, step: int, parts: Sequence[memoryview]) -> memoryview | Missed:
        """Send the payload of a step and return the server's answer.

        Raises:
            Superseded: The job was cancelled.
            AgentGone: The agent has ended.
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
    """Perform jobs until the agent ends."""
    parser = argparse.ArgumentParser(prog="device_agent.trainer.main", description=__doc__)
    parser.add_argument("--lock", type=Path, help="the inherited lock file; identifies the device in process lists")
    parser.add_argument("--memory-mb", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--light", action="store_true", help="only evaluate with ONNX Runtime; never load torch")
    parser.add_argument("--nice", type=int, default=0)
    parser.add_argument("--cpus", type=int, nargs="*", default=[])
    parser.add_argument("--log-level", default="warning")
    parser.add_argument("--plugins", nargs="*", default=[])
    parser.add_argument("--project", nargs=2, action="append", default=[], metavar=("NAME", "FOLDER"))
    options = parser.parse_args()
    processes.configure(options.log_level)
    processes.end_on_thread_failure()
    _limit_cpu_use(options.nice, options.cpus)
    registry.allow(options.plugins)
    for name, folder in options.project:
        add_project(name, Path(folder))
    log_phase(logger, "importing", pid=os.getpid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the agent decides
    for end in (0, 1):
        with suppress(OSError):  # the user's limit of pipe memory may be reached
            fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # library output must not mix with the answers
    limit = options.memory_mb << 20 or memory.default_limit()
    memory.limit_data(limit)
    memory.prefer_oom_kill()
    reader = MessageReader(sys.stdin.buffer)
    reader.start()
    if options.light:
        serve_evaluations(reader, out, options.threads)
    else:
        serve(reader, out, options.threads, options.device, limit)


def _limit_cpu_use(nice: int, cpus: Sequence[int]) -> None:
    """Set nice value and CPU affinity of this process; call it before torch counts CPUs.

    Args:
        cpus: CPU numbers to run on; empty for all.
    """
    try:
        if nice > os.getpriority(os.PRIO_PROCESS, 0):
            os.setpriority(os.PRIO_PROCESS, 0, nice)
        if cpus:
            os.sched_setaffinity(0, cpus)
    except OSError as error:
        logger.warning("nice %d, CPUs %s not set: %s; training continues", nice, cpus, error.strerror)


def serve(reader: MessageReader, out: BinaryIO, threads: int, device: str = "cpu", limit: int = 0) -> None:
    """Perform jobs in order. Torch is imported here, while the first task's parameters are still being downloaded.

    Args:
        threads: Threads of torch; 0 to choose the fastest number by timing.
        limit: Memory limit in bytes; 0 for none.
    """
    malloc.enable_huge_pages()
    with loading():
        from device_agent.trainer.perform import perform_task  # noqa: PLC0415 - imports torch
        from device_agent.trainer.task import TrainingTask  # noqa: PLC0415
        from shared.tensors.placement import is_broken, share_memory  # noqa: PLC0415

        workspace = _prepare_workspace(threads, device, limit)
    exchange = PipeExchange(reader, out)

    @lru_cache(maxsize=1)
    def tune(*, frees_memory: bool) -> None:
        malloc.tune(*(malloc.LARGE_BYTES, malloc.RETAINED_BYTES) if frees_memory else malloc.STEPS)

    def do(job: Job, meter: ProcessMeter) -> Update:
        if workspace().device.type == "cuda":
            share_memory(workspace().device, limit, memory.resident_bytes())
        training = TrainingTask(job, workspace(), meter.task, reader.cancelled.is_set, exchange)
        tune(frees_memory=training.algorithm.resources.frees_memory)
        return perform_task(training)

    _do_jobs(reader, out, do, is_broken)


def serve_evaluations(reader: MessageReader, out: BinaryIO, threads: int) -> None:
    """Perform jobs that only evaluate, with ONNX Runtime; others fail.

    Args:
        threads: Threads of ONNX Runtime; 0 for one.
    """

    def do(job: Job, meter: ProcessMeter) -> Update:
        from device_agent.trainer.evaluation import GraphTask, evaluate_by_graph, read_examples  # noqa: PLC0415

        return evaluate_by_graph(GraphTask(job, read_examples, meter.task, reader.cancelled.is_set, threads))

    _do_jobs(reader, out, do, lambda _error: False)


def _do_jobs(
    reader: MessageReader,
    out: BinaryIO,
    do: Callable[[Job, ProcessMeter], Update],
    is_broken: Callable[[BaseException], bool],
) -> None:
    """Perform jobs until the agent ends, or an error has made this process unusable."""
    from device_agent.exchange import outbox  # noqa: PLC0415 - heavy
    from device_agent.measurement.board import Meters  # noqa: PLC0415

    meters, broken = Meters(), False
    log_phase(logger, "idle")
    while not broken and (job := reader.jobs.get()) is not None:  # else the agent starts another process
        answer: FromTrainer = Done()
        phase = "training" if job.task.train else "evaluating"
        log_phase(logger, phase, run=job.task.run, round=job.task.round)
        try:
            outbox.write(Path(job.draft), do(job, meters.meter_for(job.measuring, job.cost.idle_w)))
            log_phase(logger, "committing")
            outbox.commit(Path(job.draft))
            log_phase(logger, "committed")
        except Superseded:
            answer = Failed("superseded")
            log_phase(logger, "failed")
        except (FieldFleetError, MemoryError, *registry.FAULTS) as error:
            answer, broken = Failed(_describe_failure(error, job)), is_broken(error)
            log_phase(logger, "failed")
        except AgentGone:
            return  # in a split session; the next agent repeats the task
        try:
            out.write(frame(answer))
        except BrokenPipeError:
            return  # the agent has ended; the update is in its outbox
        log_phase(logger, "idle")


def _prepare_workspace(threads: int, device: str, limit: int) -> Callable[[], Workspace]:
    """Configure torch; return a function that returns the workspace or raises ConfigError for an unusable device."""
    import torch  # noqa: PLC0415

    from device_agent.trainer.threads import ThreadTuner  # noqa: PLC0415
    from device_agent.trainer.workspace import Workspace  # noqa: PLC0415
    from shared.tensors.placement import choose_device  # noqa: PLC0415

    tuner = None if threads else ThreadTuner(count_usable_cpus(), torch.set_num_threads, perf_counter)
    torch.set_num_threads(threads or count_usable_cpus())
    workspace = cache(lambda: Workspace(device=choose_device(device, limit), threads=tuner))
    with suppress(ConfigError):
        workspace()
    return workspace


def _describe_failure(error: Exception, job: Job) -> str:
    """Log an error and describe it for the server, without traceback for expected errors.

    The server does not retry after a ConfigError; missing examples are a TaskFailed, since the folder may come back.
    """
    logger.warning("job failed: %s", error, exc_info=not isinstance(error, FieldFleetError | OSError))
    if isinstance(error, MemoryError) or "allocate memory" in str(error) or "Cannot allocate" in str(error):
        return f"out of memory: {escape_text(str(error))}; raise trainer.memory_mb or use a smaller model or batch"
    is_away = isinstance(error, ConfigError) and job.data.path and not Path(job.data.path).exists()
    return escape_text(f"{'TaskFailed' if is_away else type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
