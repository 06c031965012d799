"""Evaluate the received parameters and train them on this device's examples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from device_agent.trainer.task import FULL_BITS, TrainingTask, session_needed
from device_agent.trainer.task_files import build_update, read_state, write_result
from shared.algorithms.base import Result
from shared.algorithms.fedavg import require_finite
from shared.models.adaptation import frozen_names
from shared.protocol.messages import Transfer, Update
from shared.tensors.generators import seed_torch
from shared.tensors.mixed_precision import PRECISION_BITS
from shared.tensors.tree import State, Tree


def train(task: TrainingTask) -> Update:
    """Evaluate the received parameters and train, each as the task requests."""
    result, transfer, trained_on = None, None, task.trained_on
    with task.measure() as usage, seed_torch(task.job.task.assignment.seed):
        start = task.read_fitting_parameters()
        held_out = task.evaluate(start)
        if task.job.task.train:
            _, result, transfer = run_training(task, start)
    return build_update(task.job, usage, held_out, result=result, transfer=transfer, trained_on=trained_on)


def run_training(task: TrainingTask, start: Tree) -> tuple[State, Result, Transfer]:
    """Run the algorithm's local training, unless its result exists already, and encode the result."""
    job = task.job
    bits = task.precision_bits
    state, memory = read_state(Path(job.state), task.workspace.device)
    result = task.trained
    if result is None:
        outcome = task.algorithm.local(task.model, state, start, task.batches(), job.task.assignment)
        if not isinstance(outcome, tuple):
            raise session_needed(job.task)
        state, result = outcome
    if job.task.adaptation:
        frozen = frozen_names(task.model, job.task.adaptation)
        result = replace(result, tree={name: leaf for name, leaf in result.tree.items() if name not in frozen})
    require_finite(result.tree)
    if bits is not None:
        result = replace(result, metrics={**result.metrics, PRECISION_BITS: float(bits)})
        if bits == FULL_BITS:
            precision = job.task.assignment.hyper.step.precision
            line = f"{task.trained_on} does not compute in {precision}: training is in float32, as the update says"
            task.workspace.warn_once(Path(job.state).parent, line)
    return state, result, write_result(job, state, memory, result)
