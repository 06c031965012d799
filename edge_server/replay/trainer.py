"""Trainer of a replayed device: runs tasks in virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec

from device_agent.exchange.split_session import Exchange
from device_agent.measurement.task_meter import BlockCost
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

# The duration of a step is known in a replay, so a measuring task runs a single step.
MEASURE_S = 1e-9


@dataclass
class ReplayTrainer:
    """Implementation of the agent's trainer interface for one replayed device.

    Attributes:
        workspace: Computes split sessions in this process, step by step.
    """

    behaviour: Behaviour
    workload: Workload
    jobs: JobQueue
    clock: Clock
    workspace: Workspace

    async def ready(self, _task: Task, /) -> None:
        """Do nothing: a replayed trainer needs no warm-up."""

    async def __call__(self, job: Job, exchange: Exchange | None = None) -> None:
        """Wait the virtual seconds of a task while the job queue computes it.

        A split session is computed in this process, step by step.
        """
        if exchange:
            work, forward = self.workload.session_work(job)
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
        """Return a cost with the joules of a transfer added, unless the device's radio power is unknown.

        Args:
            figure: `download_joules` or `upload_joules`.
            start: Virtual second at which the transfer began.
            stop: Virtual second at which the transfer ended.
        """
        provenance = self.behaviour.provenance
        named = {name: provenance[name] for name in (figure, figure.replace("joules", "s")) if name in provenance}
        joules = self.behaviour.radio("down" if figure == "download_joules" else "up", start, stop)
        if joules is None:
            named.pop(figure, None)
            return msgspec.structs.replace(cost, provenance=cost.provenance | named)
        return msgspec.structs.replace(cost, provenance=cost.provenance | named, **{figure: joules})

    def _order(self, job: Job) -> tuple[float, TrainingOrder]:
        """Return a job's virtual seconds and its training order."""
        compute, begun = self.behaviour.compute, self.clock()
        effort = compute(self.workload.task_work(job), begun)
        if not job.task.measure_s:
            return effort.seconds + effort.lag_s, TrainingOrder(job, _cost(effort))
        step = compute(self.workload.step_work(job), begun)
        task = msgspec.structs.replace(job.task, measure_s=MEASURE_S)
        quick = msgspec.structs.replace(job, task=task)
        return effort.seconds + effort.lag_s + job.task.measure_s, TrainingOrder(quick, _cost(effort), _cost(step))


def _cost(effort: Effort) -> BlockCost:
    return BlockCost(
        compute_s=effort.seconds,
        cycles=effort.cycles,
        joules=effort.joules,
        idle_w=effort.idle_w,
        provenance=effort.provenance,
    )
