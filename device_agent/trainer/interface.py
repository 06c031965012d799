"""Interface between agent and trainer: `Job`, `Trainer`, and the messages of their pipes.

A message is a u32 length and MessagePack. The payloads of a split session follow their messages as raw bytes, to avoid
copies.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol, TypeAlias

import msgspec

from device_agent.exchange.split_session import Exchange
from device_agent.measurement.calibration_file import MeasurementSettings
from shared.data.spec import Data
from shared.protocol.measurements import Cost
from shared.protocol.messages import Task

HEAD_BYTES = 4


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Task with the paths of its files, so that no tensor passes through the agent.

    Attributes:
        state: The device's state of this run; the file may be missing.
        graph: ONNX graph of the network if ONNX Runtime evaluates; else empty.
        base: Payload with the frozen leaves of the network; empty if all leaves are in `params`.
        keeps_own: True to write the personal model to the draft too, since the board serves it.
        cost: Cost of the task before training.
        measuring: Measurement settings; None to measure nothing, as in a replay.
    """

    task: Task
    params: str
    state: str
    draft: str
    data: Data
    frame_bytes: int
    cost: Cost
    measuring: MeasurementSettings | None = None
    graph: str = ""
    base: str = ""
    keeps_own: bool = False


class Trainer(Protocol):
    """Performs jobs: writes the update of each to its draft."""

    def __call__(self, job: Job, exchange: Exchange | None = None) -> Awaitable[None]:
        """Perform a job.

        Args:
            exchange: Exchanges the steps of a split session with the server; None for other jobs.

        Raises:
            TaskFailed: The task failed; the message is the cause.
            TrainerDied: The trainer's process ended; it may still have committed the update.
            SessionLost: The split session broke; the job may be repeated.
        """
        ...

    async def ready(self, task: Task, /) -> None:
        """Start a trainer for a task, after any earlier trainer process of this device has ended."""
        ...


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
