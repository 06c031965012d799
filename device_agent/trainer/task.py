"""Inputs of a training or evaluation task: algorithm, network, examples, parameters, state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Protocol, TypeAlias

import msgspec
import torch

from device_agent.measurement.task_meter import BlockCost
from device_agent.trainer import task_files
from device_agent.trainer.evaluation import GraphTask, HeldOut
from device_agent.trainer.interface import Job
from device_agent.trainer.workspace import NO_EXAMPLES, TaskBatches, Workspace
from shared.algorithms import ALGORITHMS
from shared.algorithms.base import Algorithm, Result
from shared.codecs import CODECS
from shared.data.assigned import with_assignment
from shared.data.spec import Data
from shared.errors import ConfigError, TaskFailed, WireError
from shared.models import MODELS
from shared.models.base import Model
from shared.models.evaluate import score
from shared.objectives.classification import CLASSIFICATION
from shared.objectives.loss_table import LOSSES
from shared.objectives.metric_sums import HeldOutScore, build_score
from shared.objectives.metric_table import METRICS
from shared.objectives.training import TrainingObjective, build_training_objective
from shared.plugins import require_same
from shared.protocol.messages import Missed, Spec, Task
from shared.registry import build
from shared.tensors.mixed_precision import computes_in
from shared.tensors.placement import describe, synchronize
from shared.tensors.tree import Tree, to_device

log = logging.getLogger("trainer")

FULL_BITS, REDUCED_BITS = 32, 16
"""Bits of a training step."""

MeasureBlock: TypeAlias = Callable[[], AbstractContextManager[BlockCost]]
"""Measures the cost of a block; the cost is complete at the end of the block."""

ALONE = "a device alone has only the part below the cut"


class StepExchange(Protocol):
    """Blocking exchange of the steps of a split training with the server."""

    @property
    def bytes_so_far(self) -> tuple[int, int] | None:
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
        exchange: Exchanges split steps with the server; None for other jobs.
        trained: Result of a replay that trained several devices at once; None to train here.
    """

    job: Job
    workspace: Workspace
    measure_block: MeasureBlock
    is_superseded: Callable[[], bool]
    exchange: StepExchange | None = None
    trained: Result | None = None

    @cached_property
    def algorithm(self) -> Algorithm:
        """The task's algorithm, once its plugins are known to be those of the server.

        Raises:
            ConfigError: A plugin is of another version here, or it is missing.
        """
        task = self.job.task
        if not task.plugins:
            return _build_algorithm(msgspec.json.encode(task.algorithm))
        require_same(task.plugins, (ALGORITHMS, CODECS, LOSSES, METRICS, MODELS), task.device)
        return build(ALGORITHMS, task.algorithm, "algorithm")

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
        if built.example == example and built.objective is self.objective:
            return built
        return replace(built, objective=self.objective, example=example)

    @cached_property
    def objective(self) -> TrainingObjective:
        """The task's loss and metrics."""
        spec = self.job.task.objective
        return build_training_objective(spec) if spec else CLASSIFICATION

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

    def as_graph_task(self) -> GraphTask:
        """Return the task for ONNX Runtime, which reads the held-out examples as views of the workspace's tensors."""

        def read(data: Data) -> HeldOut:
            held_out = self.workspace.data(data)[1]
            return held_out.inputs.numpy(), held_out.labels.numpy()

        return GraphTask(self.job, read, self.measure_block, self.is_superseded, torch.get_num_threads())

    @cached_property
    def trained_on(self) -> str:
        """Description of the computing device, for the update; a task in 16 bits names their type too."""
        device, precision = describe(self.workspace.device), self.job.task.assignment.hyper.step.precision
        return device if self.precision_bits != REDUCED_BITS else f"{device} {precision}"

    @cached_property
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
            if self.workspace.device.type == "cuda":
                synchronize(self.workspace.device)

    def read_parameters(self) -> Tree:
        """Return the task's parameters as views of their file, validated before a network is built.

        Raises:
            FieldFleetError: The parameters cannot be used.
        """
        job, algorithm = self.job, self.algorithm
        like = self.outline
        tree = task_files.read_parameters(Path(job.base), like) if job.base else {}
        tree |= task_files.read_parameters(Path(job.params), None if algorithm.check_update else like)
        if not algorithm.check_update and not algorithm.split and (missing := sorted(like.keys() - tree.keys())):
            raise WireError(f"tensor {missing[0]!r} is missing (of {len(missing)} in all)", reason="shape")
        return to_device(tree, self.workspace.device)

    @property
    def outline(self) -> Tree:
        """Leaves of the network, without storage."""
        return self.workspace.outline(self.job.task.model, self.job.task.adaptation)

    def read_fitting_parameters(self) -> Tree:
        """Return the task's parameters once the examples are known to fit the network."""
        start = self.read_parameters()
        if not self.algorithm.program:
            self.require_fit()
        return start

    def require_fit(self) -> None:
        """Refuse examples that do not fit the network; raises as `Workspace.require_fit`."""
        objective, data = self.objective, self.evaluation_data or self.data
        self.workspace.require_fit(
            self.job.task.model,
            data,
            split=bool(self.algorithm.split),
            objective=objective,
            adaptation=self.job.task.adaptation,
        )

    def evaluate(self, tree: Tree) -> HeldOutScore:
        """Evaluate parameters on the device's held-out examples, if there are any, or by the user's program."""
        if program := self.algorithm.program:
            if not self.job.task.evaluate:
                return HeldOutScore()
            state, _ = task_files.read_state(Path(self.job.state), self.workspace.device)
            return HeldOutScore(program.evaluate(self.model, state, tree, self.job.task.assignment))
        data = self.evaluation_data
        if data is None:
            return HeldOutScore()
        leaves = {name: tree[name] for name in self.outline if name in tree}  # a personal model may lack counters
        layers, held_out = self.model.layers, self.workspace.data(data)[1]
        if not (examples := len(held_out.labels)):
            return HeldOutScore()
        scored = score(layers.eval(), leaves, held_out, self.objective)
        return build_score(
            examples=examples,
            loss=scored.loss if scored.counted else None,
            accuracy=scored.accuracy,
            metrics=scored.metrics,
            sums=scored.sums,
        )


@lru_cache(maxsize=4)
def _build_algorithm(encoded: bytes) -> Algorithm:
    """Build an algorithm of this package: a record of functions without state, so that tasks may share it."""
    return build(ALGORITHMS, msgspec.json.decode(encoded, type=Spec), "algorithm")


def session_needed(task: Task) -> TaskFailed:
    """Return the error of a task that needs the server at every step."""
    return TaskFailed(f"algorithm {task.algorithm.name!r} trains in a split session: {ALONE}")
