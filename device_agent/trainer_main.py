"""The trainer's own process: jobs come in on standard input, answers go out on standard output."""

from __future__ import annotations

import argparse
import logging
import os
import queue
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import BinaryIO

import msgspec

from device_agent.job import Job
from device_agent.trainer import Cancel, Done, Failed, FromTrainer, Start, ToTrainer, frame
from shared import heap, log
from shared.errors import FieldFleetError, Superseded

HEAD_BYTES = 4
EXIT_GARBLED = 70

logger = logging.getLogger("trainer")


class Inlet(threading.Thread):
    """Reads jobs while the main thread trains; knows at once when a job is given up or the agent is gone."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(name="inlet", daemon=True)
        self._stream = stream
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.cancelled = threading.Event()

    def run(self) -> None:
        """Read until the agent is gone; a job under way is still finished then. What is no message ends the process."""
        try:
            while (message := self._next()) is not None:
                match message:
                    case Start(job=job):
                        self.cancelled.clear()
                        self.jobs.put(job)
                    case Cancel():
                        self.cancelled.set()
        except msgspec.DecodeError as error:
            logger.critical("the agent sent what is no message: %s; ending", error)
            os._exit(EXIT_GARBLED)  # from a thread nothing less would; the main thread may be deep in a library
        self.jobs.put(None)

    def _next(self) -> ToTrainer | None:
        """Return the next message; None where the agent closed its end, be it in the middle of one."""
        head = self._stream.read(HEAD_BYTES)
        size = int.from_bytes(head, "little")
        data = self._stream.read(size) if len(head) == HEAD_BYTES else b""
        if len(head) < HEAD_BYTES or len(data) < size:
            return None
        message: ToTrainer = msgspec.msgpack.decode(data, type=ToTrainer)
        return message


def main() -> None:
    """Serve jobs until the agent is gone."""
    parser = argparse.ArgumentParser(prog="device_agent.trainer_main", description=__doc__)
    parser.add_argument("--lock", type=Path, help="whose lock it was born with; tells people which device's it is")
    parser.add_argument("--memory-mb", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--log-level", default="warning")
    options = parser.parse_args()
    log.configure(options.log_level)
    logger.debug("phase importing pid=%d", os.getpid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the agent decides
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints must not get between the answers
    if options.memory_mb:
        resource.setrlimit(resource.RLIMIT_DATA, (options.memory_mb << 20,) * 2)
    inlet = Inlet(sys.stdin.buffer)
    inlet.start()
    serve(inlet, answers, options.threads)


def serve(inlet: Inlet, answers: BinaryIO, threads: int) -> None:
    """Do jobs in order. Torch is imported here, while the parameters of the first task are still on their way."""
    heap.huge_pages()
    import torch  # noqa: PLC0415 - nothing heavy before the process is known to be needed

    from device_agent import outbox, training  # noqa: PLC0415
    from device_agent.board import Meters  # noqa: PLC0415

    if threads:
        torch.set_num_threads(threads)
    bench, meters = training.Bench(), Meters()
    logger.debug("phase idle")
    while (job := inlet.jobs.get()) is not None:
        answer: FromTrainer = Done()
        task, work = job.task, "training" if job.task.train else "evaluating"
        logger.debug("phase %s run=%s round=%d", work, task.run, task.round)
        try:
            training.perform(job, bench, meters.of(job).task, inlet.cancelled.is_set)
            logger.debug("phase committing")
            outbox.commit(Path(job.draft))
            logger.debug("phase committed")
        except Superseded:
            answer = Failed("superseded")
            logger.debug("phase failed")
        except (FieldFleetError, MemoryError, RuntimeError, OSError, ValueError) as error:
            answer = Failed(_cause(error))
            logger.warning("job failed", exc_info=True)
            logger.debug("phase failed")
        try:
            answers.write(frame(answer))
        except BrokenPipeError:
            return  # the agent is gone; what was finished is in its outbox
        logger.debug("phase idle")


def _cause(error: Exception) -> str:
    if isinstance(error, MemoryError) or "allocate memory" in str(error) or "Cannot allocate" in str(error):
        return f"out of memory: {error}; raise trainer.memory_mb or use a smaller model or batch"
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
