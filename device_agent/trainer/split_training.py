"""A split training in bytes: what goes up at every step, what comes down, and what it came to at the end."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from device_agent.measurement.task_meter import BlockCost
from shared.algorithms.base import Outcome, Session
from shared.codecs import CODECS
from shared.codecs.base import decode_bounded
from shared.models.build import seed_torch
from shared.protocol import payload as payloads
from shared.protocol.messages import Missed, Task, mix
from shared.registry import build
from shared.tensors.placement import CPU, to_device
from shared.tensors.tree import Tree


class SplitTraining:
    """A split training in bytes: the open step's payload goes up, the server's answer comes down.

    Every step draws from torch's own generator as its own seed says, whatever other trainings do in between.

    Args:
        session: The algorithm's device half, not begun yet.
        task: Its seed, device and codec count.
        spent: Is told when computing rests.
        device: Where the session computes; what travels is on the CPU.

    Attributes:
        step: The open one, from 1.
        up: Its payload in parts, views of tensors that are used again once the answer is there; None when the training
            has ended.
        outcome: What the training gave, when it has ended.
        missed: Steps that went on without this device.
        carried: Bytes of frames that the steps took, up and down, as their driver says; None where nobody counts them.
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
        """Count what passes in a block as exchange, not as computing."""
        return self._usage.measure_exchange()

    def advance(self, answer: memoryview | Missed) -> None:
        """Take the server's answer to the open step, and compute the next one's payload.

        Raises:
            WireError: The answer cannot be decoded.
        """
        self.up = None  # views of what the session computes with
        if isinstance(answer, Missed):
            self.missed += min(answer.steps, self._task.assignment.steps + 1 - self.step)
            self.step += answer.steps
            self._compute(answer)
        else:
            self.step += 1
            self._compute(to_device(decode_bounded(self._codec, payloads.unpack(answer)).tree, self._device))

    def _compute(self, down: Tree | Missed | None) -> None:
        try:
            with seed_torch(mix(self._task.assignment.seed, self.step, self._task.device)):
                up = next(self._session) if down is None else self._session.send(down)
                self.up = payloads.pack(self._codec.encode(to_device(up, CPU), None)[0])
        except StopIteration as end:
            self.outcome = end.value

    def close(self) -> None:
        """End a training that is given up."""
        self._session.close()
