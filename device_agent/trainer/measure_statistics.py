"""Measure running statistics, or sum the inputs to train on."""

from __future__ import annotations

from itertools import islice

from device_agent.trainer.task import TrainingTask
from device_agent.trainer.task_files import build_codec, build_update, write_payload
from shared.algorithms.base import Result
from shared.data.moments import sum_moments
from shared.models.running_statistics import measure_several, statistic_names
from shared.objectives.metric_sums import HeldOutScore
from shared.protocol.messages import STATISTICS_BATCHES, Update
from shared.tensors.generators import seed_torch
from shared.tensors.tree import CPU, Tree


def measure_statistics(task: TrainingTask) -> Update:
    """Measure what the assignment asks for, and return it without any trained parameter."""
    job, result, transfer, sums = task.job, None, None, HeldOutScore()
    if job.task.assignment.sums_inputs:
        with task.measure() as usage:
            sums = sum_inputs(task)
        return build_update(job, usage, sums, trained_on=task.trained_on)
    with task.measure() as usage, seed_torch(job.task.assignment.seed):
        tree, metrics = with_statistics(task, task.read_parameters())
        statistics = {name: tree[name].to(CPU) for name in statistic_names(task.model.layers)}
        result = Result(statistics, 1.0, 0, metrics=metrics)
        transfer = write_payload(job, build_codec(job.task.codec).encode(result.tree, None)[0])
    return build_update(job, usage, result=result, transfer=transfer, trained_on=task.trained_on)


def with_statistics(task: TrainingTask, tree: Tree) -> tuple[Tree, dict[str, float]]:
    """Return parameters with running statistics measured on the assigned number of batches, and that metric."""
    batches = islice(task.batches(epochs=1), task.job.task.assignment.batches_to_measure)
    tree, count = measure_several(task.model.layers, tree, (inputs for inputs, _ in batches))
    return tree, {STATISTICS_BATCHES: float(count)}


def sum_inputs(task: TrainingTask) -> HeldOutScore:
    """Return the sums of the inputs to train on, if the assignment asks for them."""
    if not task.job.task.assignment.sums_inputs:
        return HeldOutScore()
    train, _, _ = task.workspace.data(task.data)
    return HeldOutScore(sums=sum_moments(train.inputs.numpy()))
