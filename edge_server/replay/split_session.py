"""Split training session of a replayed device, computed step by step in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from device_agent.exchange.split_session import Exchange
from device_agent.measurement.task_meter import BlockCost
from device_agent.trainer.interface import Job
from device_agent.trainer.perform import begin_split_training
from device_agent.trainer.workspace import Workspace
from edge_server.replay.devices.behaviour import Effort
from edge_server.replay.training_executor import FAILURES
from shared.errors import SessionLost, TaskFailed
from shared.protocol.messages import Missed
from shared.runtime.clock import Clock


@dataclass
class SessionCost:
    """Cost of a split session and the part of it spent so far.

    Attributes:
        effort: Cost of the complete session, with all its steps.
        forward: Share of a step that computes the features to send, in [0, 1].
        steps: Steps of the complete session.
        ups: Forward passes done so far.
        downs: Backward passes done; 0 while running statistics are measured.
        exchange_s: Seconds spent waiting for the server.
    """

    effort: Effort
    forward: float
    steps: int
    ups: int = 0
    downs: int = 0
    exchange_s: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds of one step, forward and backward."""
        return self.effort.seconds / self.steps

    @contextmanager
    def meter(self) -> Iterator[BlockCost]:
        """Charge the task for the passes done by the end of the block.

        A step that the server finished without this device has no backward pass.
        """
        cost = BlockCost(idle_w=self.effort.idle_w, provenance=dict(self.effort.provenance))
        yield cost
        share = (self.ups * self.forward + self.downs * (1 - self.forward)) / self.steps
        cycles, joules = self.effort.cycles, self.effort.joules
        cost.compute_s, cost.exchange_s = share * self.effort.seconds, self.exchange_s
        cost.cycles = None if cycles is None else share * cycles
        cost.joules = None if joules is None else share * joules
        watts = self.effort.exchange_w
        cost.exchange_joules = None if watts is None else watts * self.exchange_s


async def run_session(job: Job, workspace: Workspace, exchange: Exchange, clock: Clock, passed: SessionCost) -> None:
    """Run a split session in this process; the sessions of several devices interleave.

    Args:
        workspace: Shared by the devices of this process.
        exchange: Sends a step's features, returns the server's answer.

    Raises:
        TaskFailed: The device's half of the network cannot continue.
        SessionLost: The server has lost the session.
    """
    await asyncio.sleep(passed.effort.lag_s)
    trains = not job.task.assignment.measures_statistics
    try:
        with begin_split_training(job, workspace, passed.meter, lambda: False) as training:
            while training.up is not None:
                await asyncio.sleep(passed.forward * passed.step_s)
                passed.ups, handed = passed.ups + 1, clock()
                answer = await exchange(training.step, training.up)
                passed.exchange_s += clock() - handed
                if trains and not isinstance(answer, Missed):
                    await asyncio.sleep((1 - passed.forward) * passed.step_s)
                    passed.downs += 1
                training.advance(answer)
            training.carried = exchange.bytes_so_far
    except SessionLost:
        raise
    except FAILURES as error:
        raise TaskFailed(f"{type(error).__name__}: {error}") from error
