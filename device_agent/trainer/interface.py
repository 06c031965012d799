"""Define the seam between agent and trainer: a job, and whoever does it."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

import msgspec

from device_agent.exchange.split_session import Exchange
from device_agent.measurement.calibration_file import MeasurementSettings
from shared.data.spec import Data
from shared.protocol.measurements import Cost
from shared.protocol.messages import Task


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What the trainer needs to do a task; paths, so that no tensor passes through the agent.

    Attributes:
        params: File that holds the payload to start from.
        state: File that holds the device's state of this run, if there is one.
        draft: Folder of the outbox to write the update into.
        graph: File that holds the network, where ONNX Runtime evaluates; empty where the trainer does all.
        keeps_own: Whether a model of the device's own is left in the draft too: the board serves it.
        frame_bytes: Size of the frames the update will travel in.
        cost: What the task cost before training.
        measuring: How to measure; None where nobody measures, as in replay.
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
    keeps_own: bool = False


class Trainer(Protocol):
    """Do a job: write its update into the draft."""

    def __call__(self, job: Job, exchange: Exchange | None = None) -> Awaitable[None]:
        """Train.

        Args:
            exchange: How its steps reach the server, if it is a split session's.

        Raises:
            TaskFailed: The task could not be done; the message is the cause.
            TrainerDied: Its process ended; the update may have been committed all the same.
            SessionLost: As `exchange` says; the same job can be done anew.
        """
        ...

    async def ready(self, task: Task, /) -> None:
        """Return when no earlier process of this device still trains; begin to start one for a task meanwhile."""
        ...
