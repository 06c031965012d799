"""Do one task on a device: read parameters, train or take the steps of a split training, write the update.

Only here a device computes. Who drives a split training owns the network: it takes each step's payload from
`SplitTraining` and hands it the server's answer. What it gives goes into the draft.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Protocol, TypeAlias

import msgspec
import torch
from torch import nn

from device_agent.measurement.task_meter import BlockCost
from device_agent.trainer import device_state
from device_agent.trainer.draft import (
    move_result_to_cpu,
    write_payload,
    write_personal_model,
    write_result,
    write_update,
)
from device_agent.trainer.evaluation import HeldOut, TaskMonitor, evaluate_by_graph
from device_agent.trainer.interface import Job
from device_agent.trainer.split_training import SplitTraining
from device_agent.trainer.step_timing import passing, time_steps
from device_agent.trainer.threads import Threads
from device_agent.trainer.workspace import TaskBatches, Workspace
from shared.algorithms import ALGORITHMS
from shared.algorithms.base import Algorithm, Outcome, Personal, Result, Session
from shared.algorithms.personal_model import require_finite
from shared.codecs import CODECS
from shared.codecs.base import Memory, decode_bounded
from shared.data.classes import with_classes
from shared.data.spec import Data
from shared.errors import ConfigError, TaskFailed, WireError
from shared.models.base import Model
from shared.models.build import build_blank, seed_torch
from shared.models.evaluate import score
from shared.models.running_statistics import measure_several, statistic_names
from shared.protocol import payload as payloads
from shared.protocol.measurements import StepCost
from shared.protocol.messages import MISSED_STEPS, STATISTICS_BATCHES, Missed, Spec, Task, Transfer
from shared.registry import FAULTS, build
from shared.tensors.placement import CPU, describe, explain_exhausted_memory, state_to_device, synchronize, to_device
from shared.tensors.tree import State, Tree, check_like
from shared.transfer import to_file

log = logging.getLogger("trainer")

MeasureBlock: TypeAlias = Callable[[], AbstractContextManager[BlockCost]]
"""Begins to measure a block of computing, which is told what it spent when it is left."""

ALONE = "a device alone has only the part below the cut"


class StepExchange(Protocol):
    """A way to the server at every step of a split training, for a driver that may block."""

    @property
    def carried(self) -> tuple[int, int] | None:
        """Bytes of frames that the steps took so far, up and down; None where nobody counts them."""

    def __call__(self, step: int, parts: Sequence[memoryview]) -> memoryview | Missed:
        """Return the server's payload for a step's, in memory that nobody else uses."""


@dataclass
class TrainingTask:
    """A job with what it is done with; algorithm and network are built once.

    Attributes:
        workspace: Examples and networks that outlive a task.
        measure_block: Measures a block of computing.
        is_superseded: Whether the job is given up.
    """

    job: Job
    workspace: Workspace
    measure_block: MeasureBlock
    is_superseded: Callable[[], bool]

    @cached_property
    def algorithm(self) -> Algorithm:
        """The method that the task names."""
        return build(ALGORITHMS, self.job.task.algorithm, "algorithm")

    @cached_property
    def model(self) -> Model:
        """The network; without storage where the training is split: only the part below the cut takes memory then."""
        workspace = self.workspace
        return (workspace.skeleton if self.algorithm.split else workspace.model)(self.job.task.model)

    def batches(self, *, epochs: int | None = None) -> TaskBatches:
        """Return the device's mini-batches, of another number of epochs than the task's where one is given."""
        assignment = self.job.task.assignment
        if epochs is not None:
            hyper = msgspec.structs.replace(assignment.hyper, local_epochs=epochs)
            assignment = msgspec.structs.replace(assignment, hyper=hyper)
        return self.workspace.batches(self.data, assignment, self.is_superseded)

    @cached_property
    def data(self) -> Data:
        """The device's examples, their classes numbered as the task says; without labels where the method reads none.

        Raises:
            ConfigError: The method trains on labels, and the device's own file says that there are none.
        """
        data, name = self.job.data, self.job.task.algorithm.name
        place = data.path or data.source
        if self.algorithm.reads_labels and not data.is_labelled:
            raise ConfigError(f'{place}: labels = "none", and algorithm {name!r} trains on labels; take that out')
        if not self.algorithm.reads_labels and data.is_labelled:
            unread = (
                f"{place}: its labels are not read, algorithm {name!r} trains without any; with "
                'data.labels = "none" in this device\'s file it does not look for names of classes either'
            )
            self.workspace.warn_once(Path(self.job.state).parent, unread)
            data = data.drop_labels()
        return with_classes(data, self.job.task.assignment.classes)

    @cached_property
    def evaluation_data(self) -> Data | None:
        """The examples of which some are held back to evaluate on, with labels; None where nothing is to be evaluated.

        Of a method that trains without labels these are read for a task that evaluates alone, which is the plan's to
        ask for; no label leaves the device.
        """
        job, data = self.job, self.job.data
        if not job.task.evaluate or not data.is_labelled or (job.task.train and not self.algorithm.reads_labels):
            return None
        return with_classes(data, job.task.assignment.classes)

    def held_out_arrays(self, data: Data) -> HeldOut:
        """Return the examples that the device holds back, in the memory of the workspace's."""
        held_out = self.workspace.data(data)[1]
        return held_out.inputs.numpy(), held_out.labels.numpy()

    def read_state(self) -> tuple[State, Memory]:
        """Return the algorithm's state, where the task computes, and the codec's memory; raise as `device_state`."""
        state, memory = device_state.read(Path(self.job.state))
        return state_to_device(state, self.workspace.device), memory

    @property
    def trained_on(self) -> str:
        """What its update says of where it was computed."""
        return describe(self.workspace.device)

    @contextmanager
    def measure(self) -> Iterator[BlockCost]:
        """Measure a block, of which all is computed when it is left, not only given to a GPU."""
        with self.measure_block() as usage:
            yield usage
            synchronize(self.workspace.device)

    def measure_statistics(self, tree: Tree) -> tuple[Tree, dict[str, float]]:
        """Return parameters with running statistics of as many of the device's batches as it is told, and how many."""
        batches = islice(self.batches(epochs=1), self.job.task.assignment.batches_to_measure)
        tree, count = measure_several(self.model.layers, tree, (inputs for inputs, _ in batches))
        return tree, {STATISTICS_BATCHES: float(count)}


def perform(
    job: Job,
    workspace: Workspace,
    measure_block: MeasureBlock,
    is_superseded: Callable[[], bool],
    *,
    exchange: StepExchange | None = None,
    trained: Result | None = None,
) -> None:
    """Do a job: leave the whole update in its draft, durably, but do not commit it.

    Args:
        workspace: Examples and networks that outlive a task.
        measure_block: Measures a block of computing.
        is_superseded: Whether the job is given up.
        exchange: Takes the steps of a split training to the server.
        trained: What the training gave, where a replay has trained several devices at once.

    Raises:
        Superseded: `is_superseded` became true.
        TaskFailed: The training is split, and nothing takes its steps to the server.
        FieldFleetError: The task, the data or the device's state cannot be used, or the disk takes no more.
    """
    perform_task(TrainingTask(job, workspace, measure_block, is_superseded), exchange=exchange, trained=trained)


def perform_task(task: TrainingTask, *, exchange: StepExchange | None = None, trained: Result | None = None) -> None:
    """Do a task of which the method may be built already; arguments and errors as those of `perform`.

    Args:
        exchange: Carries the steps of a split session; None for any other.
        trained: What a training came to that was done already; None to train here.
    """
    with explain_exhausted_memory(task.workspace.device, task.workspace.release), _explain_single_example():
        if task.workspace.threads and (task.job.task.train or task.job.task.measure_s):
            _choose_threads(task, task.workspace.threads)
        _perform(task, exchange, trained)
    if task.workspace.threads:
        task.workspace.threads.end_task()


def _choose_threads(task: TrainingTask, threads: Threads) -> None:
    """Choose the number of threads for the task's network; a network that refuses its examples changes nothing."""
    request = task.job.task
    if task.workspace.device.type != "cpu":
        return
    try:
        inputs, _ = next(iter(task.batches(epochs=1)))
        layers = _build_bottom(task.job, build_blank(request.model)) if task.algorithm.split else task.model.layers
        with passing(layers, inputs) as step:
            network = msgspec.json.encode((request.model, request.algorithm, request.assignment.is_split))
            key = network, tuple(inputs.shape), torch.__version__
            threads.use(Path(task.job.state).parent, key, step)
    except (ConfigError, StopIteration, MemoryError, *FAULTS) as error:
        log.debug("threads are not timed: %s", error)


def _build_bottom(job: Job, model: Model) -> nn.Module:
    """Return the layers of which parameters came, with storage."""
    names = payloads.unpack(to_file.view(Path(job.params))).blobs.keys()
    layers = [layer for layer, _ in model.layers.named_children()]
    last = max((layers.index(place) for place in {name.partition(".")[0] for name in names} & {*layers}), default=0)
    bottom = model.layers[: last + 1].to_empty(device=CPU)
    for leaf in bottom.state_dict().values():
        leaf.zero_()
    return bottom


@contextmanager
def _explain_single_example() -> Iterator[None]:
    """Turn the error of BatchNorm about a batch of one example into a ConfigError with the remedy."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise ConfigError(
            "a batch of one example: the network's BatchNorm needs two values per channel to train; "
            "set hyper.batch_size to 2 or more and give this device at least two examples to train on"
        ) from error


def _perform(task: TrainingTask, exchange: StepExchange | None, trained: Result | None) -> None:
    if task.job.graph:
        monitor = TaskMonitor(task.measure_block, task.is_superseded, torch.get_num_threads())
        evaluate_by_graph(task.job, task.held_out_arrays, monitor)
        return
    if not task.algorithm.split or _only_evaluates(task.job.task):
        if task.job.task.assignment.measures_statistics:
            _perform_measurement(task)
        else:
            _perform_alone(task, trained)
        return
    if exchange is None:
        raise TaskFailed(f"algorithm {task.job.task.algorithm.name!r} trains in a split session: {ALONE}")
    with _split_training(task) as training:
        while training.up is not None:
            with training.time_exchange():
                answer = exchange(training.step, training.up)
            begun = perf_counter()
            training.advance(answer)
            if task.workspace.threads:
                task.workspace.threads.note(perf_counter() - begun)
        training.carried = exchange.carried


def _only_evaluates(task: Task) -> bool:
    """Tell whether a task is to evaluate what came, be it of a split network: then all of that has come."""
    return task.evaluate and not task.train and not task.assignment.is_split


def _perform_alone(task: TrainingTask, trained: Result | None) -> None:
    """Evaluate, train and time steps, as far as the task says so."""
    job, algorithm, metrics = task.job, task.algorithm, dict[str, float]()
    state, result, transfer, step = None, None, None, None
    with task.measure() as usage, seed_torch(job.task.assignment.seed):
        start = read_parameters(job, task.workspace, algorithm)
        task.workspace.require_fit(job.task.model, task.evaluation_data or task.data, split=bool(algorithm.split))
        if not algorithm.personal:
            metrics = _evaluate(task, start)
        if job.task.train:
            state, result, transfer = _train(task, start, trained)
        if algorithm.personal and (job.task.evaluate or job.keeps_own):
            metrics = _use_personal_model(task, algorithm.personal, state, start)
    if job.task.measure_s:
        with seed_torch(job.task.assignment.seed):
            step = _time_steps(task, start)
    cost = msgspec.structs.replace(usage.add_to(job.cost), bytes_up=transfer.size if transfer else 0)
    write_update(job, result, transfer, metrics, cost, step, trained_on=task.trained_on)


def _use_personal_model(task: TrainingTask, personal: Personal, state: State | None, start: Tree) -> dict[str, float]:
    """Evaluate the model of the device's own, and keep it where the board serves it.

    Args:
        task: It is used in.
        personal: How its method makes it.
        state: The device's after training; None where it did not train.
    """
    job = task.job
    current = task.read_state()[0] if state is None else state
    used, _ = task.measure_statistics(personal.parameters(task.model, current, start, job.task.assignment))
    if job.keeps_own and (job.task.train or current.tree):  # before its first training it has none
        write_personal_model(job, used)
    return _evaluate(task, used)


def _perform_measurement(task: TrainingTask) -> None:
    """Measure running statistics of the parameters that came, and send them alone."""
    job = task.job
    with task.measure() as usage, seed_torch(job.task.assignment.seed):
        tree, metrics = task.measure_statistics(read_parameters(job, task.workspace, task.algorithm))
        statistics = {name: tree[name].to(CPU) for name in statistic_names(task.model.layers)}
        result = Result(statistics, 1.0, 0, metrics=metrics)
        transfer = write_payload(job, build(CODECS, job.task.codec, "codec").encode(result.tree, None)[0])
    cost = msgspec.structs.replace(usage.add_to(job.cost), bytes_up=transfer.size)
    write_update(job, result, transfer, {}, cost, trained_on=task.trained_on)


def read_parameters(job: Job, workspace: Workspace, algorithm: Algorithm) -> Tree:
    """Return the parameters that came with a task; on the CPU views of their file. For wrong ones no network is built.

    Args:
        workspace: Knows the shapes of its network.
        algorithm: Its method, which may choose the leaves that travel.

    Raises:
        FieldFleetError: They cannot be used.
    """
    received = payloads.unpack(to_file.view(Path(job.params)))
    codec = build(CODECS, Spec(name=received.codec), "codec")
    if algorithm.check_update:
        tree = decode_bounded(codec, received).tree
        check_like(tree, tree)
        return to_device(tree, workspace.device)
    like = workspace.skeleton(job.task.model).tree()
    check_like(codec.outline(received), like)
    tree = codec.decode(received).tree
    check_like(tree, like)
    if not algorithm.split and (missing := sorted(like.keys() - tree.keys())):
        raise WireError(f"tensor {missing[0]!r} is missing (of {len(missing)} in all)", reason="shape")
    return to_device(tree, workspace.device)


def _train(task: TrainingTask, start: Tree, result: Result | None) -> tuple[State, Result, Transfer]:
    """Run the algorithm's device half, if it was not run before, and encode what it gives."""
    job = task.job
    state, memory = task.read_state()
    if result is None:
        outcome = task.algorithm.local(task.model, state, start, task.batches(), job.task.assignment)
        state, result = _require_whole(outcome, job.task)
    result = move_result_to_cpu(result)
    require_finite(result.tree)
    return state, result, write_result(job, state, memory, result)


def _time_steps(task: TrainingTask, start: Tree) -> StepCost:
    """Time training steps; nothing of what they train is kept."""
    algorithm, model, assignment = task.algorithm, task.model, task.job.task.assignment
    state, _ = task.read_state()
    batches = task.batches(epochs=1)  # begun anew as often as it takes
    batch_size = min(assignment.hyper.batch_size, len(batches.examples))
    local = algorithm.resources.timed_step or algorithm.local
    return time_steps(
        lambda subset: _require_whole(local(model, state, start, subset, assignment), task.job.task),
        batches,
        task.measure,
        seconds=task.job.task.measure_s,
        weights=sum(leaf.numel() for leaf in model.layers.parameters()),
        flops=task.workspace.flops(task.job.task.model, batches.examples.inputs.shape[1:], batch_size),
    )


def _require_whole(outcome: Outcome | Session, task: Task) -> Outcome:
    """Refuse a device half that needs the server at every step."""
    if not isinstance(outcome, tuple):
        raise TaskFailed(f"algorithm {task.algorithm.name!r} trains in a split session: {ALONE}")
    return outcome


def _evaluate(task: TrainingTask, tree: Tree) -> dict[str, float]:
    """Return how good parameters are on the examples this device holds back: those received, or its personal ones."""
    data = task.evaluation_data
    if data is None or not len(held_out := task.workspace.data(data)[1]):
        return {}
    result = score(task.model.layers.eval(), tree, held_out)
    return {"eval_accuracy": result.accuracy, "eval_loss": result.loss, "eval_examples": float(len(held_out))}


@contextmanager
def begin_split_training(
    job: Job, workspace: Workspace, measure_block: MeasureBlock, is_superseded: Callable[[], bool]
) -> Iterator[SplitTraining]:
    """Begin a split job, for a driver that advances it until its `up` is None; then write the update into its draft.

    Args:
        workspace: Examples and networks that outlive a task.
        measure_block: Measures a block of computing.
        is_superseded: Whether the job is given up.

    Raises:
        Superseded: `is_superseded` became true.
        FieldFleetError: The task, the data or the device's state cannot be used, or the disk takes no more.
    """
    task = TrainingTask(job, workspace, measure_block, is_superseded)
    with _explain_single_example(), _split_training(task) as training:
        yield training


@contextmanager
def _split_training(work: TrainingTask) -> Iterator[SplitTraining]:
    job, task = work.job, work.job.task
    if task.evaluate or task.measure_s or not task.train:
        raise TaskFailed(f"algorithm {task.algorithm.name!r} does not evaluate or time steps in a session: {ALONE}")
    with work.measure() as usage:
        state, memory = work.read_state()
        start = read_parameters(job, work.workspace, work.algorithm)
        session = work.algorithm.local(work.model, state, start, work.batches(), task.assignment)
        del start  # the session's own
        if isinstance(session, tuple):
            raise TaskFailed(f"algorithm {task.algorithm.name!r} is split, its device half is not: a fault of its own")
        try:
            begun = SplitTraining(session, task, usage, work.workspace.device)
        except RuntimeError:
            work.workspace.require_fit(task.model, work.data, split=True)  # says so where the examples are the cause
            raise
        with closing(begun) as training:
            yield training
        assert training.outcome is not None, "a driver advances a training to its end"
        state, result = training.outcome[0], move_result_to_cpu(training.outcome[1])
        with seed_torch(task.assignment.seed):
            transfer = write_result(job, state, memory, result)
    up, down = training.carried or (None, None)
    cost = msgspec.structs.replace(
        usage.add_to(job.cost), bytes_up=transfer.size, features_bytes=up, gradient_bytes=down
    )
    write_update(job, result, transfer, {MISSED_STEPS: float(training.missed)}, cost, trained_on=work.trained_on)
