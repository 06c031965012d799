"""Trainer of a replayed device: runs tasks in virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec

from device_agent.exchange.split_session import Exchange
from device_agent.measurement.task_meter import Spent
from device_agent.trainer.interface import Job
from device_agent.trainer.workspace import Workspace
from edge_server.replay.devices.behaviour import Behaviour, Effort
from edge_server.replay.jobs import JobQueue
from edge_server.replay.pool import TrainingOrder
from edge_server.replay.split_session import SessionCost, run_session
from edge_server.replay.workload import Workload
from shared.errors import TaskFailed
from shared.protocol.measurements import Cost
from shared.protocol.messages import Task
from shared.runtime.clock import Clock

MEASURE_S = 1e-9
"""Replay knows what a step takes: a task that measures runs one, and no more until a clock has seen enough of them."""


@dataclass
class ReplayTrainer:
    """The trainer seam of one device.

    Attributes:
        behaviour: What the device does with work.
        scale: How much work a task is.
        clock: Virtual time.
        workspace: For split sessions, which are computed here, step by step.
    """

    behaviour: Behaviour
    scale: Workload
    jobs: JobQueue
    clock: Clock
    workspace: Workspace

    async def ready(self, _task: Task, /) -> None:
        """There is nothing to wait for."""

    async def __call__(self, job: Job, exchange: Exchange | None = None) -> None:
        """Let the task's seconds pass while it is done elsewhere; those of a split session's steps, one by one."""
        if exchange:
            work, forward = self.scale.session(job)
            effort = self.behaviour.compute(work, self.clock())
            await run_session(job, self.workspace, exchange, self.clock, SessionCost(effort, forward, work.steps))
            return
        seconds, order = self._order(job)
        ticket = self.jobs.submit(order)
        try:
            await asyncio.sleep(seconds)
            cause = await self.jobs.await_end(ticket)
        except asyncio.CancelledError:
            self.jobs.withdraw(ticket)
            raise
        if cause is not None:
            raise TaskFailed(cause)

    def charge(self, cost: Cost, figure: str, start: float, stop: float) -> Cost:
        """Return a cost with the joules of a transfer, `download_joules` or `upload_joules`, if anything tells them.

        Args:
            cost: Of the task so far.
            figure: `download_joules` or `upload_joules`.
            start: Second at which the transfer began.
            stop: Second at which it ended.
        """
        provenance = self.behaviour.provenance
        named = {name: provenance[name] for name in (figure, figure.replace("joules", "s")) if name in provenance}
        joules = self.behaviour.radio("down" if figure == "download_joules" else "up", start, stop)
        if joules is None:
            named.pop(figure, None)
            return msgspec.structs.replace(cost, provenance=cost.provenance | named)
        return msgspec.structs.replace(cost, provenance=cost.provenance | named, **{figure: joules})

    def _order(self, job: Job) -> tuple[float, TrainingOrder]:
        """Return how long a job takes its device, and what to do."""
        compute, begun = self.behaviour.compute, self.clock()
        effort = compute(self.scale.of(job), begun)
        if not job.task.measure_s:
            return effort.seconds + effort.lag_s, TrainingOrder(job, _task_cost(effort))
        step = compute(self.scale.step(job), begun)
        task = msgspec.structs.replace(job.task, measure_s=MEASURE_S)
        quick = msgspec.structs.replace(job, task=task)
        return effort.seconds + effort.lag_s + job.task.measure_s, TrainingOrder(
            quick, _task_cost(effort), _task_cost(step)
        )


def _task_cost(effort: Effort) -> Spent:
    return Spent(
        compute_s=effort.seconds,
        cycles=effort.cycles,
        joules=effort.joules,
        idle_w=effort.idle_w,
        provenance=effort.provenance,
    )
