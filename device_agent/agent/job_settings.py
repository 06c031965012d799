"""Settings of a board that go into every training job."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from device_agent.exchange.state_files import state_before
from device_agent.measurement.calibration_file import MeasurementSettings
from device_agent.trainer.interface import Job
from shared.data.spec import Data
from shared.protocol.measurements import Cost
from shared.protocol.messages import Task


@dataclass
class JobSettings:
    """Data, states and measurement of a board.

    Attributes:
        states: Folder of the states that algorithms keep between rounds.
        frame_bytes: Size of an update's frames, in bytes.
        keeps_own: Whether the trainer stores the device's own parameters for the inference process.
    """

    data: Data
    states: Path
    frame_bytes: int
    measuring: MeasurementSettings | None = None
    keeps_own: bool = False

    def make_job(self, task: Task, params: Path, graph: Path | None, cost: Cost, base: Path | None = None) -> Job:
        """Return the job of a task without its draft.

        Args:
            graph: Fetched evaluation graph, if the task has one.
            base: Stored frozen leaves, if the task has some.
        """
        return Job(
            task=task,
            params=str(params),
            state=str(state_before(self.states, task.run, task.round)),
            draft="",
            data=self.data,
            frame_bytes=self.frame_bytes,
            cost=cost,
            measuring=self.measuring,
            graph=str(graph or ""),
            base=str(base or ""),
            keeps_own=self.keeps_own,
        )
