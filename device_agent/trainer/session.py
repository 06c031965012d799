"""A split session as the device computes it: what goes up is yielded to whoever drives it, who sends what comes."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias

from device_agent.measurement.task_meter import Spent
from shared.algorithms.base import Outcome, Session, mix
from shared.codecs import CODECS
from shared.models.build import seeded
from shared.protocol import payload as payloads
from shared.protocol.messages import Task
from shared.protocol.steps import Missed
from shared.registry import build
from shared.tensors.tree import Tree

Up: TypeAlias = list[memoryview]
"""A payload's bytes in parts, views of tensors that are used again once the answer is there."""

Performing: TypeAlias = Generator[Up, memoryview | Missed, None]
"""A job under way: at every step of a split session it yields a payload and is sent the server's, in memory that nobody
else uses. Its first payload belongs to step 1; after a payload comes that of the next step, after `Missed` that of so
many steps later. A task that is not split yields nothing."""


def exchanged(session: Session, task: Task, spent: Spent) -> Generator[Up, memoryview | Missed, Outcome]:
    """Drive a split device half, in bytes; return what it gives.

    Every step draws from torch's own generator as its own seed says, whatever other sessions do in between.

    Args:
        session: The algorithm's, not begun yet.
        task: Its seed, device and codec count.
        spent: Is told when computing rests.

    Raises:
        WireError: What came down cannot be decoded.
    """
    codec = build(CODECS, task.cut_codec, "codec")
    step, down = 1, None
    try:
        while True:
            with seeded(mix(task.assignment.seed, step, task.device)):
                up: Tree = next(session) if down is None else session.send(down)
                parts = payloads.pack(codec.encode(up, None)[0])
            del up, down
            with spent.exchanging():
                came = yield parts
            del parts  # views of what the session computes with
            down = came if isinstance(came, Missed) else codec.decode(payloads.unpack(came)).tree
            step += came.steps if isinstance(came, Missed) else 1
    except StopIteration as done:
        outcome: Outcome = done.value
        return outcome
    finally:
        session.close()
