"""Define the messages of agent and trainer on two pipes: u32 length, MessagePack, and raw bytes behind some of them.

The bytes of a split session's payloads are not in the messages, so that they are copied no more than a pipe must.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from device_agent.trainer.interface import Job

HEAD_BYTES = 4


class Done(msgspec.Struct, frozen=True, tag=True):
    """Child -> agent: the update is in the outbox."""


class Step(msgspec.Struct, frozen=True, tag=True):
    """Child -> agent: exchange this step's payload, `size` bytes that come right behind this."""

    step: int
    size: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Child -> agent: the job could not be done; nothing was written."""

    cause: str


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Agent -> child: give up the job you have."""


class Answer(msgspec.Struct, frozen=True, tag=True):
    """Agent -> child: what answers the step, `size` bytes right behind this; and what frames took so far."""

    step: int
    size: int
    carried: tuple[int, int]


class Skipped(msgspec.Struct, frozen=True, tag=True):
    """Agent -> child: the step, and so many in all, went on without it."""

    steps: int
    carried: tuple[int, int]


class Start(msgspec.Struct, frozen=True, tag=True):
    """Agent -> child: do this job."""

    job: Job


ToTrainer: TypeAlias = Start | Answer | Skipped | Cancel
FromTrainer: TypeAlias = Step | Done | Failed


def frame(message: ToTrainer | FromTrainer) -> bytes:
    """Return a message as it goes through the pipe: u32 length, MessagePack."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(4, "little") + data
