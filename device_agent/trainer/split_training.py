"""Device half of a split training, with encoded payloads instead of tensors."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from device_agent.measurement.task_meter import BlockCost
from shared.algorithms.base import Outcome, Session
from shared.codecs import CODECS
from shared.codecs.base import decode_bounded
from shared.models.build import seed_torch
from shared.protocol import payload as payloads
from shared.protocol.messages import Missed, Task, derive_seed
from shared.registry import build
from shared.tensors.placement import CPU, to_device
from shared.tensors.tree import Tree


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
    """

    def __init__(self, session: Session, task: Task, usage: BlockCost, device: torch.device = CPU) -> None:
        self._session, self._task, self._usage, self._device = session, task, usage, device
        self._codec = build(CODECS, task.cut_codec, "codec")
        self.step = 1
        self.up: list[memoryview] | None = None
        self.outcome: Outcome | None = None
        self.carried: tuple[int, int] | None = None
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
