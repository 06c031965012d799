"""Messages between agent and trainer: u32 length, MessagePack, raw payload.

The payloads of a split session follow their messages as raw bytes, to avoid copies.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from device_agent.trainer.interface import Job

HEAD_BYTES = 4


class Done(msgspec.Struct, frozen=True, tag=True):
    """Child -> agent: the update is in the outbox."""


class Step(msgspec.Struct, frozen=True, tag=True):
    """Child -> agent: exchange this step's payload, the next `size` bytes."""

    step: int
    size: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Child -> agent: the job failed; nothing was written."""

    cause: str


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Agent -> child: cancel the current job."""


class Answer(msgspec.Struct, frozen=True, tag=True):
    """Agent -> child: the answer to a step, the next `size` bytes; `carried` is the frame bytes so far, up and down."""

    step: int
    size: int
    carried: tuple[int, int]


class Skipped(msgspec.Struct, frozen=True, tag=True):
    """Agent -> child: `steps` steps, from the current one, were completed without this device."""

    steps: int
    carried: tuple[int, int]


class Start(msgspec.Struct, frozen=True, tag=True):
    """Agent -> child: perform this job."""

    job: Job


ToTrainer: TypeAlias = Start | Answer | Skipped | Cancel
FromTrainer: TypeAlias = Step | Done | Failed


def frame(message: ToTrainer | FromTrainer) -> bytes:
    """Encode a message for the pipe."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(4, "little") + data
