"""Train below the cut of a split network, in steps with the server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from time import perf_counter

import msgspec
import torch

from device_agent.measurement.task_meter import BlockCost
from device_agent.trainer.task import ALONE, TrainingTask, session_needed
from device_agent.trainer.task_files import build_codec, build_update, read_state, write_result
from shared.algorithms.base import Outcome, Session
from shared.codecs.base import decode_bounded
from shared.errors import TaskFailed
from shared.objectives.metric_sums import HeldOutScore
from shared.protocol import payload as payloads
from shared.protocol.messages import MISSED_STEPS, Missed, Task, Update, derive_seed
from shared.tensors.generators import seed_torch
from shared.tensors.tree import CPU, Tree, to_device


class SplitTraining:
    """Split training driven in bytes: the payload of the current step goes up, the server's answer comes down.

    Every step seeds torch's generator, so that interleaved trainings do not affect each other.

    Args:
        session: The algorithm's device half, not started.
        usage: Cost of the task, from which exchange time is excluded.
        device: Computing device; payloads are on the CPU.

    Attributes:
        step: The current step, from 1.
        up: Its payload in parts, views of tensors that `advance` overwrites; None after the last step.
        outcome: Result of the training, after the last step.
        missed: Steps completed without this device.
        carried: Frame bytes of the steps, up and down, set by the driver; None if not counted.
        update: The update, after the block of `open_session`.
    """

    def __init__(self, session: Session, task: Task, usage: BlockCost, device: torch.device = CPU) -> None:
        self._session, self._task, self._usage, self._device = session, task, usage, device
        self._codec = build_codec(task.cut_codec)
        self.step = 1
        self.up: list[memoryview] | None = None
        self.outcome: Outcome | None = None
        self.carried: tuple[int, int] | None = None
        self.update: Update | None = None
        self.missed = 0
        self._compute(None)

    def time_exchange(self) -> AbstractContextManager[None]:
        """Count the time in a block as exchange instead of computing."""
        return self._usage.measure_exchange()

    def advance(self, answer: memoryview | Missed) -> None:
        """Process the server's answer to the current step, and compute the payload of the next.

        Raises:
            WireError: The answer cannot be decoded.
        """
        self.up = None  # its views become invalid
        if isinstance(answer, Missed):
            self.missed += min(answer.steps, self._task.assignment.steps + 1 - self.step)
            self.step += answer.steps
            self._compute(answer)
        else:
            self.step += 1
            self._compute(to_device(decode_bounded(self._codec, payloads.unpack(answer)).tree, self._device))

    def _compute(self, down: Tree | Missed | None) -> None:
        try:
            with seed_torch(derive_seed(self._task.assignment.seed, self.step, self._task.device)):
                up = next(self._session) if down is None else self._session.send(down)
                self.up = payloads.pack(self._codec.encode(to_device(up, CPU), None)[0])
        except StopIteration as end:
            self.outcome = end.value

    def close(self) -> None:
        """Close a cancelled training."""
        self._session.close()


def train_split(task: TrainingTask) -> Update:
    """Train in a session with the server; return the update.

    Raises:
        TaskFailed: There is no exchange with the server.
    """
    exchange, threads = task.exchange, task.workspace.threads
    if exchange is None:
        raise session_needed(task.job.task)
    with open_session(task) as training:
        while training.up is not None:
            with training.time_exchange():
                answer = exchange(training.step, training.up)
            begun = perf_counter()
            training.advance(answer)
            if threads:
                threads.note(perf_counter() - begun)
        training.carried = exchange.bytes_so_far
    assert training.update is not None
    return training.update


@contextmanager
def open_session(work: TrainingTask) -> Iterator[SplitTraining]:
    """Start a split training for a driver that advances it until `up` is None; then set its update."""
    job, task = work.job, work.job.task
    if task.evaluate or task.measure_s or not task.train:
        raise TaskFailed(f"algorithm {task.algorithm.name!r} does not evaluate or time steps in a session: {ALONE}")
    with work.measure() as usage:
        state, memory = read_state(Path(job.state), work.workspace.device)
        start = work.read_parameters()
        session = work.algorithm.local(work.model, state, start, work.batches(), task.assignment)
        del start  # owned by the session now
        if isinstance(session, tuple):
            raise TaskFailed(
                f"algorithm {task.algorithm.name!r} is split, but its device half is not a session: fix the algorithm"
            )
        try:
            begun = SplitTraining(session, task, usage, work.workspace.device)
        except RuntimeError:
            work.require_fit()  # names the examples if they are the cause
            raise
        with closing(begun) as training:
            yield training
        assert training.outcome is not None, "a driver advances a training to its end"
        state, result = training.outcome
        with seed_torch(task.assignment.seed):
            transfer = write_result(job, state, memory, result)
    missed = HeldOutScore({MISSED_STEPS: float(training.missed)})
    update = build_update(job, usage, missed, result=result, transfer=transfer, trained_on=work.trained_on)
    up, down = training.carried or (None, None)
    cost = msgspec.structs.replace(update.cost, features_bytes=up, gradient_bytes=down)
    training.update = msgspec.structs.replace(update, cost=cost)
