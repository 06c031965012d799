"""Evaluate the received parameters and train them on this device's examples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from device_agent.trainer.draft import build_update, move_result_to_cpu, write_result
from device_agent.trainer.task import FULL_BITS, TrainingTask, require_whole
from shared.algorithms.base import Result
from shared.algorithms.personal_model import require_finite
from shared.models.adaptation import frozen_names
from shared.models.build import seed_torch
from shared.protocol.messages import Transfer, Update
from shared.tensors.mixed_precision import PRECISION_BITS
from shared.tensors.tree import State, Tree


def train(task: TrainingTask) -> Update:
    """Evaluate the received parameters and train, each as the task requests."""
    result, transfer = None, None
    with task.measure() as usage, seed_torch(task.job.task.assignment.seed):
        start = task.read_fitting_parameters()
        held_out = task.evaluate(start)
        if task.job.task.train:
            _, result, transfer = run_training(task, start)
    return build_update(task.job, usage, held_out, result=result, transfer=transfer, trained_on=task.trained_on)


def run_training(task: TrainingTask, start: Tree) -> tuple[State, Result, Transfer]:
    """Run the algorithm's local training, unless its result exists already, and encode the result."""
    job = task.job
    state, memory = task.read_state()
    result = task.trained
    if result is None:
        outcome = task.algorithm.local(task.model, state, start, task.batches(), job.task.assignment)
        state, result = require_whole(outcome, job.task)
    result = move_result_to_cpu(result)
    if job.task.adaptation:
        frozen = frozen_names(task.model, job.task.adaptation)
        result = replace(result, tree={name: leaf for name, leaf in result.tree.items() if name not in frozen})
    require_finite(result.tree)
    if task.precision_bits is not None:
        result = replace(result, metrics={**result.metrics, PRECISION_BITS: float(task.precision_bits)})
        if task.precision_bits == FULL_BITS:
            precision = job.task.assignment.hyper.step.precision
            line = f"{task.trained_on} does not compute in {precision}: training is in float32, as the update says"
            task.workspace.warn_once(Path(job.state).parent, line)
    return state, result, write_result(job, state, memory, result)
