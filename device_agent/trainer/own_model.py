"""Train with a personal model: evaluate it and write it for serving."""

from __future__ import annotations

from pathlib import Path

from device_agent.trainer.measure_statistics import with_statistics
from device_agent.trainer.task import TrainingTask
from device_agent.trainer.task_files import build_update, read_state, write_personal_model
from device_agent.trainer.train import run_training
from shared.objectives.metric_sums import HeldOutScore
from shared.protocol.messages import Update
from shared.tensors.generators import seed_torch
from shared.tensors.tree import State, Tree


def train_personal(task: TrainingTask) -> Update:
    """Train and evaluate the personal model, each as the task requests."""
    job, held_out = task.job, HeldOutScore()
    state, result, transfer = None, None, None
    with task.measure() as usage, seed_torch(job.task.assignment.seed):
        start = task.read_fitting_parameters()
        if job.task.train:
            state, result, transfer = run_training(task, start)
        if job.task.evaluate or job.keeps_own:
            if state is None:
                state, _ = read_state(Path(job.state), task.workspace.device)
            held_out = _use_personal_model(task, state, start)
    return build_update(job, usage, held_out, result=result, transfer=transfer, trained_on=task.trained_on)


def _use_personal_model(task: TrainingTask, state: State, start: Tree) -> HeldOutScore:
    """Evaluate the device's personal model, and write it to the draft if the board serves it."""
    job, personal = task.job, task.algorithm.personal
    assert personal is not None
    used, _ = with_statistics(task, personal.parameters(task.model, state, start, job.task.assignment))
    if job.keeps_own and (job.task.train or state.tree):  # there is none before the first training
        write_personal_model(job, used)
    return task.evaluate(used)
