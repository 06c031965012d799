"""Perform a task: choose its kind, compute, return or write the update.

This is the only code with which a device trains.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
import torch
from torch import nn

from device_agent.exchange import outbox
from device_agent.trainer.evaluation import evaluate_by_graph
from device_agent.trainer.interface import Job
from device_agent.trainer.measure_statistics import measure_statistics
from device_agent.trainer.own_model import train_personal
from device_agent.trainer.split_training import SplitTraining, open_session, train_split
from device_agent.trainer.step_timing import forward_backward, measure_step
from device_agent.trainer.task import MeasureBlock, TrainingTask
from device_agent.trainer.threads import ThreadTuner
from device_agent.trainer.train import train
from device_agent.trainer.workspace import Workspace
from shared.algorithms.base import Result
from shared.errors import ConfigError
from shared.models.base import Model
from shared.models.build import build_blank
from shared.models.chain import count_below
from shared.protocol import payload as payloads
from shared.protocol.messages import Update
from shared.registry import FAULTS
from shared.tensors.placement import explain_exhausted_memory
from shared.tensors.tree import CPU
from shared.transfer import to_file

log = logging.getLogger("trainer")

Kind: TypeAlias = Literal["graph", "split", "statistics", "timing", "personal", "train"]


PERFORM: Mapping[Kind, Callable[[TrainingTask], Update]] = {
    "graph": lambda task: evaluate_by_graph(task.as_graph_task()),
    "split": train_split,
    "statistics": measure_statistics,
    "timing": measure_step,
    "personal": train_personal,
    "train": train,
}


def kind_of(task: TrainingTask) -> Kind:
    """Return the kind of a task."""
    if task.job.graph:
        return "graph"
    request, assignment = task.job.task, task.job.task.assignment
    only_evaluates = request.evaluate and not request.train and not assignment.is_split  # has all parameters
    if task.algorithm.split and not assignment.sums_inputs and not only_evaluates:
        return "split"
    if assignment.measures_statistics or (assignment.sums_inputs and not request.measure_s):
        return "statistics"
    if request.measure_s:
        return "timing"
    return "personal" if task.algorithm.personal else "train"


def perform(
    job: Job,
    workspace: Workspace,
    measure_block: MeasureBlock,
    is_superseded: Callable[[], bool],
    *,
    trained: Result | None = None,
) -> None:
    """Perform a job without a session: write its update durably to the draft, without committing it.

    The arguments are attributes of `TrainingTask`.

    Raises:
        Superseded: `is_superseded` became true.
        TaskFailed: The training is split.
        FieldFleetError: The task, the data or the device's state cannot be used, or the disk is full.
    """
    task = TrainingTask(job, workspace, measure_block, is_superseded, trained=trained)
    outbox.write(Path(job.draft), perform_task(task))


def perform_task(task: TrainingTask) -> Update:
    """Return the update of a task, with its other files in the draft; raises as `perform`."""
    threads, request, device = task.workspace.threads, task.job.task, task.workspace.device
    on_gpu = explain_exhausted_memory(device, task.workspace.release) if device != CPU else nullcontext()
    with on_gpu, _explain_single_example():
        if threads and (request.train or request.measure_s):
            _choose_threads(task, threads)
        update = PERFORM[kind_of(task)](task)
    if threads:
        threads.end_task()
    return update


@contextmanager
def begin_split_training(
    job: Job, workspace: Workspace, measure_block: MeasureBlock, is_superseded: Callable[[], bool]
) -> Iterator[SplitTraining]:
    """Start a split job for a driver that advances it until `up` is None; then write the update to its draft.

    Arguments and errors are those of `perform`.
    """
    with (
        _explain_single_example(),
        open_session(TrainingTask(job, workspace, measure_block, is_superseded)) as training,
    ):
        yield training
    assert training.update is not None
    outbox.write(Path(job.draft), training.update)


@contextmanager
def _explain_single_example() -> Iterator[None]:
    """Convert BatchNorm's error about a batch of one example into a ConfigError with the remedy."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise ConfigError(
            "a batch of one example: the network's BatchNorm needs two values per channel to train; "
            "set hyper.batch_size to 2 or more and give this device at least two examples to train on"
        ) from error


def _choose_threads(task: TrainingTask, threads: ThreadTuner) -> None:
    """Choose the number of torch threads by timing steps; errors of the network are ignored here."""
    request = task.job.task
    if task.workspace.device.type != "cpu":
        return
    try:
        inputs, _ = next(iter(task.batches(epochs=1)))
        layers = _build_bottom(task.job, build_blank(request.model)) if task.algorithm.split else task.model.layers
        with forward_backward(layers, inputs) as step:
            network = msgspec.json.encode((request.model, request.algorithm, request.assignment.is_split))
            key = network, tuple(inputs.shape), torch.__version__
            threads.use(Path(task.job.state).parent, key, step)
    except (ConfigError, StopIteration, MemoryError, *FAULTS) as error:
        log.debug("threads are not timed: %s", error)


def _build_bottom(job: Job, model: Model) -> nn.Module:
    """Allocate the layers whose parameters were received."""
    names = payloads.unpack(to_file.view(Path(job.params))).blobs.keys()
    bottom: nn.Module = model.chain[: max(1, count_below(model.chain, names))].to_empty(device=CPU)
    for leaf in bottom.state_dict().values():
        leaf.zero_()
    return bottom
