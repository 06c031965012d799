"""A split task of a small perceptron, and a server's half that is no network: a gradient that follows from features."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch

from device_agent.exchange.outbox import Outbox
from device_agent.trainer.task import SplitTraining
from shared.codecs.dense import dense
from shared.protocol import payload
from shared.protocol.messages import Assignment, Hyper, Missed, Spec, Task

STEPS = 4
ALGORITHM = Spec(name="fedsl", options={"period": STEPS, "drop": 0.3, "sparsity": 0.2})


def split(task: Task, **fields) -> Task:
    """Return a task as a split one."""
    hyper = Hyper(batch_size=8, learning_rate=0.1, local_epochs=STEPS)
    values = {"first_step": 0, "total_steps": 2 * STEPS}
    assignment = Assignment(seed=5, hyper=hyper, steps=STEPS, values=values)
    return msgspec.structs.replace(task, **({"algorithm": ALGORITHM, "assignment": assignment} | fields))


def below(folder: Path, parameters: bytes) -> str:
    """Write the part of the parameters below the cut as the download leaves it; return its path."""
    tree = dense().decode(payload.unpack(memoryview(bytearray(parameters)))).tree
    bottom = {key: leaf for key, leaf in tree.items() if key.startswith("1.")}
    path = folder / "params-below"
    path.write_bytes(b"".join(payload.pack(dense().encode(bottom, None)[0])))
    return str(path)


def answer(parts: Iterable[memoryview]) -> memoryview:
    """Return what the server sends down for what came up."""
    up = dense().decode(payload.unpack(memoryview(bytearray(b"".join(parts))))).tree
    down = {"gradient": torch.tanh(up["features"]), "loss": up["features"].square().mean()}
    return memoryview(bytearray(b"".join(payload.pack(dense().encode(down, None)[0]))))


def finish(splitting: AbstractContextManager[SplitTraining]) -> int:
    """Drive a split training to its end in this process; return its steps."""
    count = 0
    with splitting as training:
        while training.up is not None:
            training.advance(answer(training.up))
            count += 1
    return count


@dataclass
class Exchanged:
    """The agent's exchange, answered here.

    Attributes:
        miss: Steps, by that at which this is said, that went on without the device.
    """

    miss: dict[int, int] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    carried: tuple[int, int] = (0, 0)

    async def __call__(self, step: int, parts) -> memoryview | Missed:
        self.steps.append(step)
        if step in self.miss:
            return Missed(self.miss[step])
        came = answer(parts)
        self.carried = self.carried[0] + sum(part.nbytes for part in parts), self.carried[1] + came.nbytes
        return came


def payload_of(box: Outbox, number: int) -> bytes:
    """Return the bytes of the update of a round."""
    return next(entry for entry in box.entries() if entry.update.round == number).payload.read_bytes()
