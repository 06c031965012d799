"""Split training session of a replayed device, computed step by step in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from device_agent.exchange.split_session import Exchange
from device_agent.measurement.task_meter import Spent
from device_agent.trainer.interface import Job
from device_agent.trainer.task import begin_split_training
from device_agent.trainer.workspace import Workspace
from edge_server.replay.devices.behaviour import Effort
from edge_server.replay.training_executor import FAILURES
from shared.errors import SessionLost, TaskFailed
from shared.protocol.messages import Missed
from shared.runtime.clock import Clock


@dataclass
class SessionCost:
    """What a session takes its device, and what of it has passed.

    Attributes:
        effort: Of the whole session, every step of it done.
        forward: Share of a step that goes before its features are there.
        steps: Of the whole session.
        ups: Forward passes that were done.
        downs: Backward passes likewise; none where running statistics are measured.
        exchange_s: Seconds between, in which the device waited for its server.
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
    def meter(self) -> Iterator[Spent]:
        """Charge the block what has passed when it ends: a step that went on without the device had no way back."""
        cost = Spent(idle_w=self.effort.idle_w, provenance=dict(self.effort.provenance))
        yield cost
        share = (self.ups * self.forward + self.downs * (1 - self.forward)) / self.steps
        cycles, joules = self.effort.cycles, self.effort.joules
        cost.compute_s, cost.exchange_s = share * self.effort.seconds, self.exchange_s
        cost.cycles = None if cycles is None else share * cycles
        cost.joules = None if joules is None else share * joules
        watts = self.effort.exchange_w
        cost.exchange_joules = None if watts is None else watts * self.exchange_s


async def run_session(job: Job, workspace: Workspace, exchange: Exchange, clock: Clock, passed: SessionCost) -> None:
    """Do a split session's job, in this process; several devices' take turns.

    Args:
        workspace: What the devices of this process train with.
        exchange: How steps reach the server.
        clock: Virtual time.
        passed: What the session takes its device.

    Raises:
        TaskFailed: The device half cannot go on.
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
            training.carried = exchange.carried
    except SessionLost:
        raise
    except FAILURES as error:
        raise TaskFailed(f"{type(error).__name__}: {error}") from error
