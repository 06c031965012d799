"""Perform a training or evaluation task: read parameters, compute, write the update.

This is the only code with which a device trains. The driver of a split training takes each step's payload from
`SplitTraining` and returns the server's answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
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
from device_agent.trainer.held_out_score import HeldOutScore, build_score
from device_agent.trainer.interface import Job
from device_agent.trainer.split_training import SplitTraining
from device_agent.trainer.step_timing import forward_backward, time_steps
from device_agent.trainer.threads import ThreadTuner
from device_agent.trainer.workspace import NO_EXAMPLES, TaskBatches, Workspace
from shared.algorithms import ALGORITHMS
from shared.algorithms.base import Algorithm, Outcome, Personal, Result, Session
from shared.algorithms.personal_model import require_finite
from shared.codecs import CODECS
from shared.codecs.base import Memory, decode_bounded
from shared.data.assigned import with_assignment
from shared.data.moments import sum_moments
from shared.data.spec import Data
from shared.errors import ConfigError, TaskFailed, WireError
from shared.models import MODELS
from shared.models.adaptation import frozen_names
from shared.models.base import Model
from shared.models.build import build_blank, seed_torch
from shared.models.chain import count_below
from shared.models.evaluate import score
from shared.models.running_statistics import measure_several, statistic_names
from shared.objectives.loss_table import LOSSES
from shared.objectives.metric_table import METRICS
from shared.objectives.training import TrainingObjective, build_training_objective
from shared.plugins import require_same
from shared.protocol import payload as payloads
from shared.protocol.measurements import StepCost
from shared.protocol.messages import MISSED_STEPS, STATISTICS_BATCHES, Missed, Spec, Task, Transfer
from shared.protocol.objective import CLASSIFICATION_SPEC
from shared.registry import FAULTS, build
from shared.tensors.mixed_precision import PRECISION_BITS, computes_in
from shared.tensors.placement import CPU, describe, explain_exhausted_memory, state_to_device, synchronize, to_device
from shared.tensors.tree import State, Tree, check_like
from shared.transfer import to_file

log = logging.getLogger("trainer")

FULL_BITS, REDUCED_BITS = 32, 16
"""Bits of a training step."""

MeasureBlock: TypeAlias = Callable[[], AbstractContextManager[BlockCost]]
"""Measures the cost of a block; the cost is complete at the end of the block."""

ALONE = "a device alone has only the part below the cut"


class StepExchange(Protocol):
    """Blocking exchange of the steps of a split training with the server."""

    @property
    def carried(self) -> tuple[int, int] | None:
        """Bytes of the steps' frames so far, up and down; None if not counted."""

    def __call__(self, step: int, parts: Sequence[memoryview]) -> memoryview | Missed:
        """Return the server's answer to a step's payload, in memory owned by the caller."""


@dataclass
class TrainingTask:
    """Job with its workspace; algorithm and network are built once.

    Attributes:
        workspace: Cache of examples and networks across tasks.
        measure_block: Measures the cost of a block.
        is_superseded: Returns True once the job is cancelled.
    """

    job: Job
    workspace: Workspace
    measure_block: MeasureBlock
    is_superseded: Callable[[], bool]

    @cached_property
    def algorithm(self) -> Algorithm:
        """The task's algorithm, once its plugins are known to be those of the server.

        Raises:
            ConfigError: A plugin is of another version here, or it is missing.
        """
        require_same(self.job.task.plugins, (ALGORITHMS, CODECS, LOSSES, METRICS, MODELS), self.job.task.device)
        return build(ALGORITHMS, self.job.task.algorithm, "algorithm")

    @cached_property
    def model(self) -> Model:
        """The network; without storage if the training is split, which allocates its part, or done by a program.

        If its builder declares no input shape, it is that of the device's examples.
        """
        workspace, algorithm, task = self.workspace, self.algorithm, self.job.task
        is_outline = algorithm.split or algorithm.program
        built = (workspace.skeleton if is_outline else workspace.model)(task.model, task.adaptation)
        example = built.example
        if not example and task.train and not algorithm.program:
            example = tuple(workspace.data(self.data)[0].inputs.shape[1:])
        return replace(built, objective=self.objective, example=example)

    @cached_property
    def objective(self) -> TrainingObjective:
        """The task's loss and metrics."""
        return build_training_objective(self.job.task.objective or CLASSIFICATION_SPEC)

    def batches(self, *, epochs: int | None = None) -> TaskBatches:
        """Return the device's mini-batches, for `epochs` epochs instead of the task's if given; none for a program."""
        assignment = self.job.task.assignment
        if self.algorithm.program:
            return TaskBatches(NO_EXAMPLES, assignment, self.is_superseded)
        if epochs is not None:
            hyper = msgspec.structs.replace(assignment.hyper, local_epochs=epochs)
            assignment = msgspec.structs.replace(assignment, hyper=hyper)
        return self.workspace.batches(self.data, assignment, self.is_superseded, self.objective)

    @cached_property
    def data(self) -> Data:
        """The device's examples with the task's class numbers; without labels if the algorithm reads none.

        A reconstruction needs no labels; where there are some, only normal examples are trained on.

        Raises:
            ConfigError: The algorithm needs labels, and the device's file has `labels = "none"`.
        """
        data, name = self.job.data, self.job.task.algorithm.name
        place = data.path or data.source
        if self.algorithm.reads_labels and not data.is_labelled and not self.objective.reconstructs:
            raise ConfigError(f'{place}: labels = "none", but algorithm {name!r} trains on labels; remove that key')
        if not self.algorithm.reads_labels and data.is_labelled:
            unread = (
                f"{place}: the labels are not used, since algorithm {name!r} trains without them; set "
                'data.labels = "none" in this device\'s file to skip the check of class names too'
            )
            self.workspace.warn_once(Path(self.job.state).parent, unread)
            data = data.drop_labels()
        return with_assignment(data, self.job.task.assignment)

    @cached_property
    def evaluation_data(self) -> Data | None:
        """The examples of which a part is held out for evaluation; None if nothing is to be evaluated.

        With an algorithm that trains without labels, they are read only for tasks that only evaluate. No label leaves
        the device.
        """
        job, data = self.job, self.job.data
        is_usable = data.is_labelled or self.objective.reconstructs
        if not job.task.evaluate or not is_usable or (job.task.train and not self.algorithm.reads_labels):
            return None
        return with_assignment(data, job.task.assignment)

    def held_out_arrays(self, data: Data) -> HeldOut:
        """Return the held-out examples as NumPy views of the workspace's tensors."""
        held_out = self.workspace.data(data)[1]
        return held_out.inputs.numpy(), held_out.labels.numpy()

    def read_state(self) -> tuple[State, Memory]:
        """Return the algorithm's state, on the computing device, and the codec's memory; raises as `device_state`."""
        state, memory = device_state.read(Path(self.job.state))
        return state_to_device(state, self.workspace.device), memory

    def add_input_sums(self, score: HeldOutScore) -> HeldOutScore:
        """Return a score with the sums of the inputs to train on, if the task asks for them."""
        if not self.job.task.assignment.sums_inputs:
            return score
        train, _, _ = self.workspace.data(self.data)
        return replace(score, sums={**score.sums, **sum_moments(train.inputs.numpy())})

    @property
    def trained_on(self) -> str:
        """Description of the computing device, for the update; a task in 16 bits names their type too."""
        device, precision = describe(self.workspace.device), self.job.task.assignment.hyper.step.precision
        return device if self.precision_bits != REDUCED_BITS else f"{device} {precision}"

    @property
    def precision_bits(self) -> int | None:
        """Bits of a training step, if the plan asks for fewer than 32; 32 where the device cannot compute in fewer."""
        precision = self.job.task.assignment.hyper.step.precision
        if precision == "float32" or not self.job.task.train:
            return None
        return REDUCED_BITS if computes_in(precision, self.workspace.device) else FULL_BITS

    @contextmanager
    def measure(self) -> Iterator[BlockCost]:
        """Measure a block including its pending GPU work."""
        with self.measure_block() as usage:
            yield usage
            synchronize(self.workspace.device)

    def measure_statistics(self, tree: Tree) -> tuple[Tree, dict[str, float]]:
        """Return parameters with running statistics measured on the assigned number of batches, and that metric."""
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
    """Perform a job: write its update durably to the draft, without committing it.

    Args:
        workspace: Cache of examples and networks across tasks.
        measure_block: Measures the cost of a block.
        is_superseded: Returns True once the job is cancelled.
        exchange: Exchanges split steps with the server; None for other jobs.
        trained: Result of a replay that trained several devices at once; None to train here.

    Raises:
        Superseded: `is_superseded` became true.
        TaskFailed: The training is split, but there is no `exchange`.
        FieldFleetError: The task, the data or the device's state cannot be used, or the disk is full.
    """
    perform_task(TrainingTask(job, workspace, measure_block, is_superseded), exchange=exchange, trained=trained)


def perform_task(task: TrainingTask, *, exchange: StepExchange | None = None, trained: Result | None = None) -> None:
    """Perform a task whose algorithm may be built already; see `perform`."""
    with explain_exhausted_memory(task.workspace.device, task.workspace.release), _explain_single_example():
        if task.workspace.threads and (task.job.task.train or task.job.task.measure_s):
            _choose_threads(task, task.workspace.threads)
        _perform(task, exchange, trained)
    if task.workspace.threads:
        task.workspace.threads.end_task()


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


def _perform(task: TrainingTask, exchange: StepExchange | None, trained: Result | None) -> None:
    if task.job.graph:
        monitor = TaskMonitor(task.measure_block, task.is_superseded, torch.get_num_threads())
        evaluate_by_graph(task.job, task.held_out_arrays, monitor)
        return
    assignment = task.job.task.assignment
    if not task.algorithm.split or assignment.sums_inputs or _only_evaluates(task.job.task):
        if assignment.sums_inputs and not task.job.task.measure_s:
            _perform_sums(task)
        elif assignment.measures_statistics:
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
    """Check for a task that only evaluates; it has received all parameters, even of a split network."""
    return task.evaluate and not task.train and not task.assignment.is_split


def _perform_alone(task: TrainingTask, trained: Result | None) -> None:
    """Evaluate, train and time steps as the task requests."""
    job, algorithm, held_out = task.job, task.algorithm, HeldOutScore()
    state, result, transfer, step = None, None, None, None
    with task.measure() as usage, seed_torch(job.task.assignment.seed):
        start = read_parameters(job, task.workspace, algorithm)
        if not algorithm.program:
            data = task.evaluation_data or task.data
            task.workspace.require_fit(
                job.task.model,
                data,
                split=bool(algorithm.split),
                objective=task.objective,
                adaptation=job.task.adaptation,
            )
        if not algorithm.personal:
            held_out = _evaluate(task, start)
        if job.task.train:
            state, result, transfer = _train(task, start, trained)
        if algorithm.personal and (job.task.evaluate or job.keeps_own):
            held_out = _use_personal_model(task, algorithm.personal, state, start)
    if job.task.measure_s:
        with seed_torch(job.task.assignment.seed):
            step = _time_steps(task, start)
        held_out = task.add_input_sums(held_out)
    cost = msgspec.structs.replace(usage.add_to(job.cost), bytes_up=transfer.size if transfer else 0)
    write_update(job, result, transfer, held_out, cost, step, trained_on=task.trained_on)


def _use_personal_model(task: TrainingTask, personal: Personal, state: State | None, start: Tree) -> HeldOutScore:
    """Evaluate the device's personal model, and write it to the draft if the board serves it.

    Args:
        state: The device's state after training; None without training.
    """
    job = task.job
    current = task.read_state()[0] if state is None else state
    used, _ = task.measure_statistics(personal.parameters(task.model, current, start, job.task.assignment))
    if job.keeps_own and (job.task.train or current.tree):  # there is none before the first training
        write_personal_model(job, used)
    return _evaluate(task, used)


def _perform_sums(task: TrainingTask) -> None:
    """Sum the inputs of the examples to train on, and send only these sums."""
    with task.measure() as usage:
        sums = task.add_input_sums(HeldOutScore())
    cost = msgspec.structs.replace(usage.add_to(task.job.cost), bytes_up=0)
    write_update(task.job, None, None, sums, cost, trained_on=task.trained_on)


def _perform_measurement(task: TrainingTask) -> None:
    """Measure running statistics of the received parameters, and send only those."""
    job = task.job
    with task.measure() as usage, seed_torch(job.task.assignment.seed):
        tree, metrics = task.measure_statistics(read_parameters(job, task.workspace, task.algorithm))
        statistics = {name: tree[name].to(CPU) for name in statistic_names(task.model.layers)}
        result = Result(statistics, 1.0, 0, metrics=metrics)
        transfer = write_payload(job, build(CODECS, job.task.codec, "codec").encode(result.tree, None)[0])
    cost = msgspec.structs.replace(usage.add_to(job.cost), bytes_up=transfer.size)
    write_update(job, result, transfer, HeldOutScore(), cost, trained_on=task.trained_on)


def read_parameters(job: Job, workspace: Workspace, algorithm: Algorithm) -> Tree:
    """Return a task's parameters, on the CPU as views of their file; they are validated before a network is built.

    Raises:
        FieldFleetError: The parameters cannot be used.
    """
    like = workspace.skeleton(job.task.model, job.task.adaptation).tree()
    base = _read_like(Path(job.base), like) if job.base else {}
    if algorithm.check_update:
        received = payloads.unpack(to_file.view(Path(job.params)))
        tree = decode_bounded(build(CODECS, Spec(name=received.codec), "codec"), received).tree
        check_like(tree, tree)
        return to_device({**base, **tree}, workspace.device)
    tree = {**base, **_read_like(Path(job.params), like)}
    if not algorithm.split and (missing := sorted(like.keys() - tree.keys())):
        raise WireError(f"tensor {missing[0]!r} is missing (of {len(missing)} in all)", reason="shape")
    return to_device(tree, workspace.device)


def _read_like(path: Path, like: Tree) -> Tree:
    """Return the leaves of a payload, as views of its file, once they are known to be some of `like`."""
    received = payloads.unpack(to_file.view(path))
    codec = build(CODECS, Spec(name=received.codec), "codec")
    check_like(codec.outline(received), like)
    tree = codec.decode(received).tree
    check_like(tree, like)
    return tree


def _train(task: TrainingTask, start: Tree, result: Result | None) -> tuple[State, Result, Transfer]:
    """Run the algorithm's local training, unless its result is given, and encode the result."""
    job = task.job
    state, memory = task.read_state()
    if result is None:
        outcome = task.algorithm.local(task.model, state, start, task.batches(), job.task.assignment)
        state, result = _require_whole(outcome, job.task)
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


def _time_steps(task: TrainingTask, start: Tree) -> StepCost:
    """Measure the cost of a training step; the trained parameters are discarded."""
    algorithm, model, assignment = task.algorithm, task.model, task.job.task.assignment
    state, _ = task.read_state()
    batches = task.batches(epochs=1)  # repeated as often as needed
    batch_size = min(assignment.hyper.batch_size, len(batches.examples))
    local = algorithm.resources.timed_step or algorithm.local
    return time_steps(
        lambda subset: _require_whole(local(model, state, start, subset, assignment), task.job.task),
        batches,
        task.measure,
        seconds=task.job.task.measure_s,
        weights=sum(leaf.numel() for leaf in model.layers.parameters()),
        flops=task.workspace.flops(
            task.job.task.model, batches.examples.inputs.shape[1:], batch_size, task.job.task.adaptation
        ),
    )


def _require_whole(outcome: Outcome | Session, task: Task) -> Outcome:
    """Refuse a split session, which needs the server at every step."""
    if not isinstance(outcome, tuple):
        raise TaskFailed(f"algorithm {task.algorithm.name!r} trains in a split session: {ALONE}")
    return outcome


def _evaluate(task: TrainingTask, tree: Tree) -> HeldOutScore:
    """Evaluate parameters on the device's held-out examples, if there are any, or by the user's program."""
    if program := task.algorithm.program:
        if not task.job.task.evaluate:
            return HeldOutScore()
        return HeldOutScore(program.evaluate(task.model, task.read_state()[0], tree, task.job.task.assignment))
    data = task.evaluation_data
    if data is None or not len(held_out := task.workspace.data(data)[1]):
        return HeldOutScore()
    model = task.model
    leaves = {name: tree[name] for name in model.tree() if name in tree}  # of a personal model, counters may be absent
    scored = score(model.layers.eval(), leaves, held_out, task.objective)
    return build_score(
        examples=len(held_out),
        loss=scored.loss if scored.counted else None,
        accuracy=scored.accuracy,
        metrics=scored.metrics,
        sums=scored.sums,
    )


@contextmanager
def begin_split_training(
    job: Job, workspace: Workspace, measure_block: MeasureBlock, is_superseded: Callable[[], bool]
) -> Iterator[SplitTraining]:
    """Start a split job for a driver that advances it until `up` is None; then write the update to its draft.

    Arguments and errors are those of `perform`.
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
        del start  # owned by the session now
        if isinstance(session, tuple):
            raise TaskFailed(
                f"algorithm {task.algorithm.name!r} is split, but its device half is not a session: fix the algorithm"
            )
        try:
            begun = SplitTraining(session, task, usage, work.workspace.device)
        except RuntimeError:
            work.workspace.require_fit(
                task.model, work.data, split=True, objective=work.objective
            )  # names the examples if they are the cause
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
    missed = HeldOutScore({MISSED_STEPS: float(training.missed)})
    write_update(job, result, transfer, missed, cost, trained_on=work.trained_on)
