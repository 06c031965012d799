"""A trainer's own process doing one task without an agent: what it takes of memory and of CPU time."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import torch

from device_agent.job import Job
from device_agent.outbox import Outbox
from device_agent.pipe import HEAD_BYTES, Answer, Failed, FromTrainer, Start, Step, frame
from shared import payload
from shared.algorithms import ALGORITHMS
from shared.algorithms.base import Algorithm, Cohort
from shared.codecs.dense import dense
from shared.data.spec import Data
from shared.measures import Cost
from shared.messages import Assignment, Hyper, Spec, Task, Transfer
from shared.models.init import initial
from shared.registry import build
from shared.tree import Tree

BATCH, EXAMPLES, STEPS = 64, 256, 4
KIB = 1024
TICK_S = 0.002


@dataclass(frozen=True)
class Taken:
    """What a task took its trainer.

    Attributes:
        base_bytes: Resident before it: Python, torch, our modules.
        peak_bytes: The most that was resident at once.
        step_s: CPU seconds of a step, the first one left out.
        update_bytes: What goes up at the end.
    """

    base_bytes: int
    peak_bytes: int
    step_s: float
    update_bytes: int

    @property
    def own_bytes(self) -> int:
        """What the task itself took."""
        return self.peak_bytes - self.base_bytes


def take(model: Spec, algorithm: Spec, *, steps: int = STEPS, codec: Spec | None = None) -> Taken:
    """Have a fresh trainer with one thread do so many steps of a method, on random pictures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        outbox = Outbox(folder / "outbox", folder / "states")
        draft = outbox.draft("lone", 1)
        job = msgspec.structs.replace(_job(folder, model, algorithm, steps, codec or Spec(name="dense")), draft=str(draft))
        with _trainer() as process:
            base = _resident(process.pid, "VmRSS")
            began, ended, peak = _converse(process, job)
        size = outbox.entries()[0].update.params.size
        return Taken(base, peak, (ended - began) / max(1, steps - 1), size)


@contextmanager
def _trainer() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "device_agent.trainer_main", "--threads", "1", "--log-level", "debug"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        while b"phase idle" not in (line := process.stderr.readline()):
            if not line:
                raise OSError("the trainer did not start")
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield process
    finally:
        process.kill()
        process.wait()


def _job(folder: Path, model: Spec, spec: Spec, steps: int, codec: Spec) -> Job:
    """Return a job whose epoch has so many batches; for a split method a session of so many steps."""
    network = initial(model, 0)
    algorithm: Algorithm = build(ALGORITHMS, spec, "algorithm")
    epochs = -(-steps * BATCH // EXAMPLES)
    hyper = Hyper(batch_size=BATCH, local_epochs=epochs, learning_rate=1e-3)
    state = algorithm.init(network, 0)
    told = algorithm.assign(state, Cohort(("board",), hyper, 0, rounds=2), {}, 1)["board"]
    start = _packed(algorithm.broadcast(state, told))
    (folder / "params").write_bytes(start)
    count = EXAMPLES if algorithm.serve else steps * BATCH
    pictures = np.random.default_rng(0).integers(0, 256, (count, *network.example), dtype=np.uint8)
    np.savez(folder / "data.npz", x=pictures, y=np.arange(count) % 10)
    task = _task(model, spec, told, codec, Transfer(digest=payload.digest([start]), size=len(start), frame_bytes=1024))
    return Job(
        task=task,
        params=str(folder / "params"),
        state=str(folder / "state"),
        draft="",
        data=Data(source="npz", path=str(folder / "data.npz")),
        frame_bytes=1024,
        cost=Cost(),
    )


def _task(model: Spec, algorithm: Spec, told: Assignment, codec: Spec, params: Transfer) -> Task:
    return Task(
        run="lone",
        round=1,
        device="board",
        algorithm=algorithm,
        model=model,
        codec=codec,
        assignment=told,
        params=params,
        shared=False,
        deadline_s=600.0,
    )


def _packed(tree: Tree) -> memoryview:
    return memoryview(bytearray(b"".join(payload.pack(dense().encode(tree, None)[0]))))


def _converse(process: subprocess.Popen[bytes], job: Job) -> tuple[float, float, int]:
    """Answer the job's steps; return the trainer's CPU seconds at the first answer and at the end, and its peak."""
    process.stdin.write(frame(Start(job)))
    process.stdin.flush()
    began = None
    while isinstance(message := _hear(process.stdout), Step):
        up = dense().decode(payload.unpack(memoryview(bytearray(process.stdout.read(message.size))))).tree
        down = _packed({"gradient": torch.ones_like(up["features"]).div_(1e3), "loss": torch.tensor(1.0)})
        if message.step == 2:
            began = _cpu_s(process.pid)
        process.stdin.write(frame(Answer(message.step, down.nbytes, (0, 0))))
        process.stdin.write(down)
        process.stdin.flush()
    if isinstance(message, Failed):
        raise OSError(message.cause)
    return began or 0.0, _cpu_s(process.pid), _resident(process.pid, "VmHWM")


def _hear(stream: BinaryIO) -> FromTrainer:
    size = int.from_bytes(stream.read(HEAD_BYTES), "little")
    return msgspec.msgpack.decode(stream.read(size), type=FromTrainer)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * KIB for line in lines if line.startswith(f"{name}:"))
