"""A trainer's own process doing one task without an agent: what it takes of memory and of CPU time."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import torch

from device_agent.exchange.outbox import Outbox
from device_agent.trainer.interface import HEAD_BYTES, Answer, Failed, FromTrainer, Job, Start, Step, frame
from shared.algorithms import ALGORITHMS
from shared.algorithms.base import Algorithm, Cohort
from shared.codecs.dense import dense
from shared.data.spec import Data
from shared.models.build import build_initial
from shared.protocol import payload
from shared.protocol.measurements import Cost
from shared.protocol.messages import Assignment, Hyper, Spec, Task, Transfer
from shared.registry import build
from shared.runtime import malloc
from shared.tensors.tree import Tree

BATCH, KIB = 64, 1024


@dataclass(frozen=True)
class Taken:
    """What a task took its trainer.

    Attributes:
        base_bytes: Resident before it: Python, torch, our modules.
        peak_bytes: The most that was resident at once.
        cpu_s: CPU seconds of its process, from the task to its end.
    """

    base_bytes: int
    peak_bytes: int
    cpu_s: float

    @property
    def own_bytes(self) -> int:
        """What the task itself took."""
        return self.peak_bytes - self.base_bytes


def take(model: Spec, algorithm: Spec, steps: int, *, batch: int = BATCH, lean: bool = False) -> Taken:
    """Have a fresh trainer with one thread do so many steps of a method, on random pictures.

    Args:
        algorithm: The method; a split one's session must have as many steps.
        lean: Whether its allocator gives large tensors back at once, whatever the method asks for.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        draft = Outbox(folder / "outbox", folder / "states").draft("lone", 1)
        job = msgspec.structs.replace(_job(folder, model, algorithm, (steps, batch)), draft=str(draft))
        with _trainer(malloc.ENVIRONMENT if lean else {}) as process:
            _be_refused(process, job)
            base, began = _resident(process.pid, "VmRSS"), _cpu_s(process.pid)
            _converse(process, job)
            return Taken(base, _resident(process.pid, "VmHWM"), _cpu_s(process.pid) - began)


@contextmanager
def _trainer(environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "device_agent.trainer.main", "--threads", "1", "--log-level", "error"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(command, env=os.environ | environment, **pipes)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _job(folder: Path, model: Spec, spec: Spec, size: tuple[int, int]) -> Job:
    """Return a job of one epoch, or of a split session, of so many batches of so many examples; without a draft yet."""
    (steps, batch), network = size, build_initial(model, 0)
    algorithm: Algorithm = build(ALGORITHMS, spec, "algorithm")
    hyper = Hyper(batch_size=batch, local_epochs=1, learning_rate=1e-3)
    state = algorithm.init(network, 0)
    told = algorithm.assign(state, Cohort(("board",), hyper, 0, rounds=2), {}, 1)["board"]
    start = _packed(algorithm.broadcast(state, "board", told))
    (folder / "params").write_bytes(start)
    count = steps * batch
    pictures = np.random.default_rng(0).integers(0, 256, (count, *network.example), dtype=np.uint8)
    np.savez(folder / "data.npz", x=pictures, y=np.arange(count) % 10)
    task = _task(model, spec, told, Transfer(digest=payload.digest([start]), size=len(start), frame_bytes=1024))
    return Job(
        task=task,
        params=str(folder / "params"),
        state=str(folder / "state"),
        draft="",
        data=Data(source="npz", path=str(folder / "data.npz")),
        frame_bytes=1024,
        cost=Cost(),
    )


def _task(model: Spec, algorithm: Spec, told: Assignment, params: Transfer) -> Task:
    return Task(
        run="lone",
        round=1,
        device="board",
        algorithm=algorithm,
        model=model,
        codec=Spec(name="dense"),
        assignment=told,
        params=params,
        shared=False,
        deadline_s=600.0,
    )


def _packed(tree: Tree) -> memoryview:
    return memoryview(bytearray(b"".join(payload.pack(dense().encode(tree, None)[0]))))


def _be_refused(process: subprocess.Popen[bytes], job: Job) -> None:
    """Give the trainer a job of no method, which it answers as soon as it has loaded all that it needs for any."""
    nothing = msgspec.structs.replace(job.task.algorithm, name="nothing")
    process.stdin.write(
        frame(Start(msgspec.structs.replace(job, task=msgspec.structs.replace(job.task, algorithm=nothing))))
    )
    process.stdin.flush()
    if not isinstance(answer := _hear(process.stdout), Failed):
        raise OSError(f"a job of no method was answered with {answer}")


def _converse(process: subprocess.Popen[bytes], job: Job) -> None:
    """Answer the job's steps as a server would, until it is done."""
    process.stdin.write(frame(Start(job)))
    process.stdin.flush()
    while isinstance(message := _hear(process.stdout), Step):
        up = dense().decode(payload.unpack(memoryview(bytearray(process.stdout.read(message.size))))).tree
        down = _packed({"gradient": torch.ones_like(up["features"]).div_(1e3), "loss": torch.tensor(1.0)})
        process.stdin.write(frame(Answer(message.step, down.nbytes, (0, 0))))
        process.stdin.write(down)
        process.stdin.flush()
    if isinstance(message, Failed):
        raise OSError(message.cause)


def _hear(stream: BinaryIO) -> FromTrainer:
    if not (head := stream.read(HEAD_BYTES)):
        raise OSError("the trainer has ended")
    size = int.from_bytes(head, "little")
    return msgspec.msgpack.decode(stream.read(size), type=FromTrainer)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * KIB for line in lines if line.startswith(f"{name}:"))
