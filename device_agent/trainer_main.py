"""The trainer's own process: jobs come in on standard input, answers go out on standard output."""

from __future__ import annotations

import argparse
import fcntl
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

from device_agent.agent import Job
from device_agent.trainer import Cancel, Done, Failed, FromTrainer, Start, ToTrainer, frame
from shared import log
from shared.errors import FieldFleetError, Superseded

HEAD_BYTES = 4


class Inlet(threading.Thread):
    """Reads jobs while the main thread trains; knows at once when a job is given up or the agent is gone."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(name="inlet", daemon=True)
        self._stream = stream
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.cancelled = threading.Event()

    def run(self) -> None:
        """Read until the agent closes its end; a job under way is still finished then."""
        while len(head := self._stream.read(HEAD_BYTES)) == HEAD_BYTES:
            data = self._stream.read(int.from_bytes(head, "little"))
            match msgspec.msgpack.decode(data, type=ToTrainer):
                case Start(job=job):
                    self.cancelled.clear()
                    self.jobs.put(job)
                case Cancel():
                    self.cancelled.set()
        self.jobs.put(None)


def main() -> None:
    """Serve jobs until the agent is gone."""
    parser = argparse.ArgumentParser(prog="device_agent.trainer_main", description=__doc__)
    parser.add_argument("--lock", type=Path, required=True)
    parser.add_argument("--memory-mb", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    log.configure("warning")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the agent decides
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints must not get between the answers
    held = options.lock.open("w")
    fcntl.flock(held, fcntl.LOCK_EX)
    if options.memory_mb:
        resource.setrlimit(resource.RLIMIT_DATA, (options.memory_mb << 20,) * 2)
    inlet = Inlet(sys.stdin.buffer)
    inlet.start()
    serve(inlet, answers, options.threads)


def serve(inlet: Inlet, answers: BinaryIO, threads: int) -> None:
    """Do jobs in order. Torch is imported here, while the parameters of the first task are still on their way."""
    import torch  # noqa: PLC0415 - nothing heavy before the process is known to be needed

    from device_agent import outbox, training  # noqa: PLC0415
    from device_agent.metering import ProcessMeter  # noqa: PLC0415

    if threads:
        torch.set_num_threads(threads)
    bench = training.Bench()
    while (job := inlet.jobs.get()) is not None:
        answer: FromTrainer = Done()
        try:
            training.perform(job, bench, ProcessMeter().task, inlet.cancelled.is_set)
            outbox.commit(Path(job.draft))
        except Superseded:
            answer = Failed("superseded")
        except (FieldFleetError, MemoryError, RuntimeError, OSError, ValueError) as error:
            answer = Failed(_cause(error))
            logging.getLogger("trainer").warning("job failed", exc_info=True)
        try:
            answers.write(frame(answer))
        except BrokenPipeError:
            return  # the agent is gone; what was finished is in its outbox


def _cause(error: Exception) -> str:
    if isinstance(error, MemoryError) or "allocate memory" in str(error) or "Cannot allocate" in str(error):
        return f"out of memory: {error}; raise trainer.memory_mb or use a smaller model or batch"
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
