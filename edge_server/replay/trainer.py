"""A replayed device's trainer: says what a task takes there, has it done here, and lets that time pass.

A split session of a replayed device: computed here, step by step, each in the virtual seconds it takes there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
from torch import nn

from device_agent.exchange.split_session import Exchange
from device_agent.measurement.task_meter import Spent
from device_agent.trainer.interface import Job
from device_agent.trainer.task import begin_split_training
from device_agent.trainer.workspace import Workspace
from edge_server.replay.devices.behaviour import Behaviour, Effort, Work, batches
from edge_server.replay.jobs import FAILURES, Jobs
from edge_server.replay.pool import TrainingOrder
from shared.algorithms import ALGORITHMS
from shared.data.cache import DataCache
from shared.data.sources.arrays import count_held_out, count_trained_on
from shared.data.spec import Data
from shared.errors import SessionLost, TaskFailed
from shared.models.build import blank
from shared.models.cost import step_flops
from shared.models.evaluate import build_skeleton
from shared.protocol import payload
from shared.protocol.measurements import Cost
from shared.protocol.messages import Missed, Spec, Task, steps_of
from shared.registry import build
from shared.runtime.clock import Clock
from shared.transfer import to_file

AT_ONCE_S = 1e-9
"""Replay knows what a step takes: a task that measures runs one, and no more until a clock has seen enough of them."""


@dataclass
class Pass:
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
    def metered(self) -> Iterator[Spent]:
        """Charge the block what has passed when it ends: a step that went on without the device had no way back."""
        spent = Spent(idle_w=self.effort.idle_w, provenance=dict(self.effort.provenance))
        yield spent
        share = (self.ups * self.forward + self.downs * (1 - self.forward)) / self.steps
        cycles, joules = self.effort.cycles, self.effort.joules
        spent.compute_s, spent.exchange_s = share * self.effort.seconds, self.exchange_s
        spent.cycles = None if cycles is None else share * cycles
        spent.joules = None if joules is None else share * joules
        watts = self.effort.exchange_w
        spent.exchange_joules = None if watts is None else watts * self.exchange_s


async def play(job: Job, workspace: Workspace, exchange: Exchange, clock: Clock, passed: Pass) -> None:
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
        with begin_split_training(job, workspace, passed.metered, lambda: False) as training:
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


@dataclass
class Scale:
    """How much work tasks are, by the data of their devices and the shape of their network."""

    shelf: DataCache
    _networks: dict[bytes, nn.Module] = field(default_factory=dict)
    _shares: dict[bytes, float] = field(default_factory=dict)

    def of(self, job: Job) -> Work:
        """Return the work of a whole task.

        Raises:
            ConfigError: The device's data or its network cannot be had.
        """
        if job.task.assignment.steps:
            return self.session(job)[0]
        task, total = job.task, self.shelf.count(job.data)
        held = count_held_out(total, job.data.holdout)
        own = count_trained_on(total, job.data)
        told = task.assignment
        passed = held if task.evaluate else 0
        if task.evaluate or told.measures_statistics:
            passed += min(own, told.batches_to_measure * told.hyper.batch_size)
        flops = passed * self.flops(task.model, job.data, 1, trains=False) if passed else 0
        if not task.train:
            return self._work(job, steps=0, examples=passed, flops=flops)
        steps = steps_of(told, own)
        sizes = batches(own, told.hyper.batch_size, steps, merges_single=told.merges_single)
        dense = sum(count * self.flops(task.model, job.data, one) for one, count in sizes.items() if count)
        flops += round(self._share(job) * dense)
        examples = sum(one * count for one, count in sizes.items())
        return self._work(job, steps=steps, examples=examples, flops=flops)

    def session(self, job: Job) -> tuple[Work, float]:
        """Return the work of a whole split session below the cut, and the share of it that is forward passes.

        A method may pass every batch more than once through layers below the cut, such as through a teacher's.

        Raises:
            ConfigError: As `of`.
        """
        task, total = job.task, self.shelf.count(job.data)
        came = payload.unpack(to_file.view(Path(job.params))).blobs.keys()
        network = self._network(task.model)
        names = came & network.state_dict().keys()
        split = build(ALGORITHMS, task.algorithm, "algorithm").split
        more = split.passes - 1 if split else 0  # beside the one that is trained by
        layers = [layer for layer, _ in network.named_children()]
        below = 1 + max(layers.index(name.partition(".")[0]) for name in names)
        told, steps = task.assignment, task.assignment.steps
        own = count_trained_on(total, job.data)
        sizes = batches(own, told.hyper.batch_size, steps, merges_single=told.merges_single)
        forward, both = (
            sum(
                count * self.flops(task.model, job.data, one, trains=trains, below=below)
                for one, count in sizes.items()
            )
            for trains in (False, True)
        )
        forward, both = forward * (1 + more), both + forward * more
        examples = sum(one * count for one, count in sizes.items())
        work = self._work(job, steps=steps, examples=examples, flops=both)
        weights = sum(leaf.numel() for name, leaf in network.named_parameters() if name in names)
        return replace(work, weights=weights), forward / both if both else 0.0

    def step(self, job: Job) -> Work:
        """Return the work of one training step of a task.

        Raises:
            ConfigError: As `of`.
        """
        total = self.shelf.count(job.data)
        size = min(job.task.assignment.hyper.batch_size, count_trained_on(total, job.data))
        flops = round(self._share(job) * self.flops(job.task.model, job.data, size))
        work = self._work(job, steps=1, examples=size, flops=flops)
        return replace(work, train=True)  # the task that times it trains nothing for good

    def flops(self, spec: Spec, data: Data, batch_size: int, *, trains: bool = True, below: int | None = None) -> int:
        """Return the floating-point operations of one step, or of its part in the layers below a place; counted once.

        Args:
            data: What it trains on.
            batch_size: Examples in a step.
            trains: Whether there is a backward pass.
            below: Layers below the cut of a split network; None for the whole network.

        Raises:
            ConfigError: As `of`.
        """
        shape = self.shelf.example(data).shape
        return step_flops(spec, shape, batch_size, trains=trains, below=below)

    def _work(self, job: Job, *, steps: int, examples: int, flops: int) -> Work:
        task = job.task
        return Work(
            steps=steps,
            examples=examples,
            weights=sum(leaf.numel() for leaf in self._network(task.model).parameters()),
            flops=flops,
            run=task.run,
            round=task.round,
            train=task.train,
            share=self._share(job),
        )

    def _share(self, job: Job) -> float:
        """Return the share of a whole network's step that a step of the task's algorithm is."""
        task, told = job.task, job.task.assignment
        said = told.hyper.batch_size, told.hyper.local_epochs, told.values
        key = msgspec.msgpack.encode((task.algorithm, task.model, said))
        if key not in self._shares:
            step_share = build(ALGORITHMS, task.algorithm, "algorithm").resources.step_share
            self._shares[key] = step_share(blank(task.model), told) if step_share else 1.0
        return self._shares[key]

    def _network(self, spec: Spec) -> nn.Module:
        key = msgspec.msgpack.encode(spec)
        if key not in self._networks:
            self._networks[key] = build_skeleton(spec)
        return self._networks[key]


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
    scale: Scale
    jobs: Jobs
    clock: Clock
    workspace: Workspace

    async def ready(self, _task: Task, /) -> None:
        """There is nothing to wait for."""

    async def __call__(self, job: Job, exchange: Exchange | None = None) -> None:
        """Let the task's seconds pass while it is done elsewhere; those of a split session's steps, one by one."""
        if exchange:
            work, forward = self.scale.session(job)
            effort = self.behaviour.compute(work, self.clock())
            await play(job, self.workspace, exchange, self.clock, Pass(effort, forward, work.steps))
            return
        seconds, order = self._order(job)
        ticket = self.jobs.submit(order)
        try:
            await asyncio.sleep(seconds)
            cause = await self.jobs.ended(ticket)
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
        known = self.behaviour.provenance
        named = {name: known[name] for name in (figure, figure.replace("joules", "s")) if name in known}
        joules = self.behaviour.radio("down" if figure == "download_joules" else "up", start, stop)
        if joules is None:
            named.pop(figure, None)
            return msgspec.structs.replace(cost, provenance=cost.provenance | named)
        return msgspec.structs.replace(cost, provenance=cost.provenance | named, **{figure: joules})

    def _order(self, job: Job) -> tuple[float, TrainingOrder]:
        """Return how long a job takes its device, and what to do."""
        compute, begun = self.behaviour.compute, self.clock()
        whole = compute(self.scale.of(job), begun)
        if not job.task.measure_s:
            return whole.seconds + whole.lag_s, TrainingOrder(job, _spent(whole))
        step = compute(self.scale.step(job), begun)
        task = msgspec.structs.replace(job.task, measure_s=AT_ONCE_S)
        quick = msgspec.structs.replace(job, task=task)
        return whole.seconds + whole.lag_s + job.task.measure_s, TrainingOrder(quick, _spent(whole), _spent(step))


def _spent(effort: Effort) -> Spent:
    return Spent(
        compute_s=effort.seconds,
        cycles=effort.cycles,
        joules=effort.joules,
        idle_w=effort.idle_w,
        provenance=effort.provenance,
    )
