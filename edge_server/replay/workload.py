"""Workload of a task: steps, examples, weights and floating-point operations."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from device_agent.trainer.interface import Job
from edge_server.replay.devices.behaviour import Work, batches
from shared.algorithms import ALGORITHMS
from shared.data.cache import DataCache
from shared.data.spec import NONE, Data
from shared.models.base import Model
from shared.models.build import build_blank
from shared.models.chain import count_below
from shared.models.cost import step_flops, trained_share
from shared.protocol import payload
from shared.protocol.adaptation import NetworkAdaptation
from shared.protocol.messages import Spec, count_steps
from shared.registry import build
from shared.transfer import to_file


@dataclass
class Workload:
    """Compute the work of tasks from the device's data and the network's shapes."""

    cache: DataCache
    _models: dict[bytes, Model] = field(default_factory=dict)
    _shares: dict[bytes, float] = field(default_factory=dict)

    def task_work(self, job: Job) -> Work:
        """Return the work of a complete task.

        Raises:
            ConfigError: The device's data or network cannot be loaded.
        """
        if job.task.assignment.steps:
            return self.session_work(job)[0]
        if job.data.source == NONE:  # the examples of a user's program are unknown, and take no virtual time
            return self._make_work(job, steps=0, examples=0, flops=0)
        task, (held_out, trained_on) = job.task, self.cache.count_sides(job.data)
        assignment = task.assignment
        passed = held_out if task.evaluate else 0
        if task.evaluate or assignment.measures_statistics:
            passed += min(trained_on, assignment.batches_to_measure * assignment.hyper.batch_size)
        flops = passed * self.flops(task.model, job.data, 1, trains=False, adaptation=task.adaptation) if passed else 0
        if not task.train:
            return self._make_work(job, steps=0, examples=passed, flops=flops)
        steps = count_steps(assignment, trained_on)
        sizes = batches(trained_on, assignment.hyper.batch_size, steps, merges_single=assignment.merges_single)
        dense = sum(count * self.flops(task.model, job.data, size) for size, count in sizes.items() if count)
        flops += round(self._share(job) * dense)
        examples = sum(size * count for size, count in sizes.items())
        return self._make_work(job, steps=steps, examples=examples, flops=flops)

    def session_work(self, job: Job) -> tuple[Work, float]:
        """Return the work of a split session below the cut and the share of forward passes in it.

        An algorithm may pass every batch several times through layers below the cut, for example through a teacher's.

        Raises:
            ConfigError: As `task_work`.
        """
        task, (_, trained_on) = job.task, self.cache.count_sides(job.data)
        received = payload.unpack(to_file.view(Path(job.params))).blobs.keys()
        model = self._model(task.model)
        names = received & model.tree().keys()
        split = build(ALGORITHMS, task.algorithm, "algorithm").split
        more = split.passes - 1 if split else 0  # besides the trained pass
        below = count_below(model.chain, names)
        assignment, steps = task.assignment, task.assignment.steps
        sizes = batches(trained_on, assignment.hyper.batch_size, steps, merges_single=assignment.merges_single)
        forward, both = (
            sum(
                count * self.flops(task.model, job.data, size, trains=trains, below=below)
                for size, count in sizes.items()
            )
            for trains in (False, True)
        )
        forward, both = forward * (1 + more), both + forward * more
        examples = sum(size * count for size, count in sizes.items())
        work = self._make_work(job, steps=steps, examples=examples, flops=both)
        weights = sum(leaf.numel() for name, leaf in model.layers.named_parameters() if name in names)
        return replace(work, weights=weights), forward / both if both else 0.0

    def step_work(self, job: Job) -> Work:
        """Return the work of one training step of a task.

        Raises:
            ConfigError: As `task_work`.
        """
        size = min(job.task.assignment.hyper.batch_size, self.cache.count_sides(job.data)[1])
        flops = round(self._share(job) * self.flops(job.task.model, job.data, size))
        work = self._make_work(job, steps=1, examples=size, flops=flops)
        return replace(work, train=True)  # a measuring task discards its training

    def flops(
        self,
        spec: Spec,
        data: Data,
        batch_size: int,
        *,
        trains: bool = True,
        below: int | None = None,
        adaptation: NetworkAdaptation | None = None,
    ) -> int:
        """Return the floating-point operations of one step, as `step_flops`; 0 for data of a user's program.

        Raises:
            ConfigError: As `task_work`.
        """
        if data.source == NONE:
            return 0
        shape = self.cache.example(data).shape
        return step_flops(spec, shape, batch_size, trains=trains, below=below, adaptation=adaptation)

    def _make_work(self, job: Job, *, steps: int, examples: int, flops: int) -> Work:
        task = job.task
        return Work(
            steps=steps,
            examples=examples,
            weights=sum(leaf.numel() for leaf in self._model(task.model).layers.parameters()),
            flops=flops,
            run=task.run,
            round=task.round,
            train=task.train,
            share=self._share(job),
        )

    def _share(self, job: Job) -> float:
        """Return a step's share of a full training step, as the device trains only part of the network."""
        if job.data.source == NONE:
            return 1.0
        task, assignment = job.task, job.task.assignment
        settings = assignment.hyper.batch_size, assignment.hyper.local_epochs, assignment.values
        example = tuple(self.cache.example(job.data).shape)
        key = msgspec.msgpack.encode((task.algorithm, task.model, settings, example, task.adaptation))
        if key not in self._shares:
            model = self._model(task.model)
            model = replace(model, example=model.example or example)
            step_share = build(ALGORITHMS, task.algorithm, "algorithm").resources.step_share
            share = trained_share(task.model, example, task.adaptation)
            self._shares[key] = share * (step_share(model, assignment) if step_share else 1.0)
        return self._shares[key]

    def _model(self, spec: Spec) -> Model:
        key = msgspec.msgpack.encode(spec)
        if key not in self._models:
            self._models[key] = build_blank(spec)
        return self._models[key]
