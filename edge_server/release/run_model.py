"""Load a run's trained model with its input shape, classes and preprocessing."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from edge_server.journal import checkpoints
from edge_server.journal.compared import best_round, compared_metric, devices_value, measured_rounds, server_value
from edge_server.journal.compared_metric import ACCURACY, ComparedMetric
from edge_server.journal.records import (
    AnyRecord,
    Evaluated,
    RoundClosed,
    RoundOpened,
    RunOpened,
    closed_rounds,
    drop_void,
)
from edge_server.journal.runs import BEST, CHECKPOINTS, FOLDER, StoredRun, best_path
from edge_server.learner import plan_algorithm
from edge_server.plan.data import test_data
from edge_server.plan.inputs import planned_inputs
from edge_server.plan.plan import Plan
from edge_server.rounds.plugins import changed_network_code
from shared.algorithms import ALGORITHMS
from shared.algorithms.base import Algorithm, join_network
from shared.data.classes import normalise_class_names
from shared.data.examples import Examples
from shared.data.load import load
from shared.errors import ConfigError, WireError, first_line
from shared.models.base import Model
from shared.models.build import build_blank, build_zeroed
from shared.models.leaves import load_leaves
from shared.objectives.base import build_objective
from shared.protocol.inference.release import Preprocessing, ReleaseSource, ReleaseTask
from shared.protocol.inputs import Inputs
from shared.protocol.messages import ProjectVersion
from shared.registry import FAULTS, build, normalise_distribution
from shared.tensors import file
from shared.tensors.tree import State, Tree, check_like

log = logging.getLogger(__name__)

PROBES, PROBE_SEED = 10, 0
PICTURE_EXTENTS = 3
LAYOUTS = {1: "NF", 2: "NCL", 3: "NCHW"}
"""Tensor layout by the number of dimensions of one input."""


@dataclass(frozen=True)
class RunModel:
    """A trained network with its metadata.

    Attributes:
        model: Network in evaluation mode.
        tree: The model's parameters and buffers, by the network's names; all finite.
        example: Shape of one input, without the batch.
        classes: Class names; empty if classes are numbered only.
        source: Run and round of the model, and its accuracy.
        task: What it was trained for; unset for a classification without a table `[task]`.
    """

    plan: Plan
    model: Model
    tree: Tree
    example: tuple[int, ...]
    classes: tuple[str, ...]
    preprocessing: Preprocessing
    source: ReleaseSource
    task: ReleaseTask | msgspec.UnsetType = msgspec.UNSET

    @property
    def what(self) -> str:
        """Description for messages."""
        return f"model {self.plan.model.name!r} of run {self.source.run}, round {self.source.round}"


def read_model(run: StoredRun, number: int | None = None, example: Sequence[int] = ()) -> RunModel:
    """Load the global model of a run after a round.

    Args:
        number: Round; None for the most accurate stored one, or the last one if the plan keeps that.
        example: Shape of one input; empty for that of the plan's data, of the devices' examples, or else the network's
            declared one.

    Raises:
        ConfigError: The run stores no complete model of that round, its parameters are not finite, its input shape is
            unknown, or its network may not be imported.
        CorruptFile: The checkpoint is damaged.
    """
    model, number = read_network(run, number)
    assert run.opened
    plan = run.opened.plan
    inputs = _find_inputs(plan, run.records, _checkpoint_path(run, number))
    has_tests = not example and bool(plan.evaluation.every or not (inputs and inputs.shape))
    examples = load_test_examples(plan) if has_tests else None
    tested = () if examples is None else tuple(examples.inputs.shape[1:])
    shape = tuple(example) or tested or (inputs.shape if inputs else ()) or model.example
    if not shape:
        raise ConfigError(f"model {plan.model.name!r} declares no input shape; give --example")
    classes = _find_class_names(plan, examples, run.records)
    source = _describe_source(run, build(ALGORITHMS, plan.algorithm, "algorithm"), number)
    prepared = _describe_preprocessing(inputs, shape)
    task = _describe_task(run, number)
    return RunModel(plan, model, model.tree(), shape, classes, prepared, source, task)


def read_network(run: StoredRun, number: int | None = None) -> tuple[Model, int]:
    """Load a run's network in evaluation mode; return it and the round after which it was.

    Args:
        number: Round; None for the default of `read_model`.

    Raises:
        ConfigError: As `read_model`, but for the input shape; or the code of the network is missing.
        CorruptFile: The checkpoint is damaged.
    """
    start = run.opened
    if start is None:
        raise ConfigError(f"run {run.folder.name} was never started, so it has no model; choose another run")
    plan = start.plan
    if changes := changed_network_code(start):
        log.warning("%s; the weights are those of the run, and the network is that of the present code", changes)
    algorithm = plan_algorithm(plan)
    number = number or _default_round(run, plan)
    try:
        state = file.load(_checkpoint_path(run, number))
    except FileNotFoundError as error:  # a running server replaced the checkpoint after it was listed
        raise ConfigError(f"run {run.folder.name} has replaced its model of round {number}; try again") from error
    tree = _load_network(algorithm, state, build_blank(plan.model), run, number)
    model = build_zeroed(plan.model)
    load_leaves(model.layers, tree)
    model.layers.eval()
    return model, number


def _default_round(run: StoredRun, plan: Plan) -> int:
    """Return the best stored round if the plan keeps the best model, or else the last one."""
    rounds = stored_rounds(run)
    if not rounds:
        raise ConfigError(
            f"run {run.folder.name} stores no model: none of its rounds was aggregated, or the run was imported; "
            "choose another run"
        )
    measured = [entry for entry in measured_rounds(run.records) if entry[1] in rounds]
    best = best_round(measured, compared_metric(run.records)) if plan.evaluation.keep == "best" else None
    return best[1] if best else rounds[-1]


def stored_rounds(run: StoredRun) -> list[int]:
    """Return the rounds whose models are stored, ascending and without void rounds."""
    folder = run.folder / FOLDER
    names = [path.name for pattern in (CHECKPOINTS, BEST) for path in folder.glob(pattern)]
    numbers = {int(digits) for name in names if (digits := name.rpartition("-")[2].partition(".")[0]).isdecimal()}
    closed = {record.round for record in closed_rounds(run.records) if record.outcome == "aggregated"}
    return sorted((numbers | {checkpoints.good_number(folder)}) & closed)


def _checkpoint_path(run: StoredRun, number: int) -> Path:
    rounds = stored_rounds(run)
    if number not in rounds:
        some = ", ".join(map(str, rounds)) or "none"
        raise ConfigError(f"run {run.folder.name} stores no model of round {number}; --round may be: {some}")
    folder = run.folder / FOLDER
    best = best_path(folder, number)
    return best if best.exists() else checkpoints.state_path(folder, number)


def _load_network(algorithm: Algorithm, state: State, model: Model, run: StoredRun, number: int) -> Tree:
    """Return the evaluated network of a state; require all tensors, with matching shapes and finite values."""
    try:
        tree = join_network(algorithm, model, state)
    except ConfigError as error:
        remedy = "choose a run whose algorithm trains the complete network"
        raise ConfigError(f"run {run.folder.name}: {error}; {remedy}") from error
    try:
        check_like(tree, model.tree())
    except WireError as error:
        remedy = "; another round may do, see --round" if error.reason == "not-finite" else ""
        raise ConfigError(f"run {run.folder.name}, round {number}: parameter {error}{remedy}") from error
    return tree


def load_test_examples(plan: Plan) -> Examples | None:
    """Load the server's test data; None if the plan has none or they are not on this machine."""
    if not plan.data:
        return None
    try:
        return load(test_data(plan))
    except ConfigError as error:
        log.warning(
            "the run's test data cannot be loaded (%s); using the input shape of the devices, or else of the network",
            error,
        )
        return None


def _find_class_names(plan: Plan, examples: Examples | None, records: Iterable[AnyRecord]) -> tuple[str, ...]:
    """Return class names from the plan, the server's test data, or the last agreement of the devices."""
    if plan.data and plan.data.classes:
        return normalise_class_names(plan.data.classes)
    if examples is not None and examples.classes:
        return normalise_class_names(examples.classes)
    agreed = [record.classes for record in records if isinstance(record, RoundOpened) and record.classes]
    return agreed[-1] if agreed else ()


def _find_inputs(plan: Plan, records: Iterable[AnyRecord], checkpoint: Path) -> Inputs | None:
    """Return the input preparation that the devices agreed on, or else the plan's; None if unknown.

    A mean and deviation that devices measured are those in the checkpoint, by which its model was trained.
    """
    agreed = [record.inputs for record in records if isinstance(record, RoundOpened) and record.inputs]
    inputs = agreed[-1] if agreed else planned_inputs(plan)
    origin = checkpoints.read_origin(checkpoint)
    if origin and (measured := origin.moments):
        return msgspec.structs.replace(inputs or Inputs(), mean=measured.mean, std=measured.std)
    return inputs


def _describe_preprocessing(inputs: Inputs | None, example: Sequence[int]) -> Preprocessing:
    is_picture = len(example) == PICTURE_EXTENTS
    size, layout = tuple(example[1:]) if is_picture else (), LAYOUTS.get(len(example), "")
    if inputs is None:
        return Preprocessing(size=size, layout=layout)
    fields: dict[str, Any] = {}
    if inputs.scale is not None:
        fields = {"byte_scale": inputs.scale, "dtype": "float32" if inputs.scale == 1 else "uint8"}
    fields |= {"mean": inputs.mean, "std": inputs.std, "features": inputs.features}
    return Preprocessing(size=size, layout=layout, **fields)


def _describe_source(run: StoredRun, algorithm: Algorithm, number: int) -> ReleaseSource:
    assert run.opened
    plan, personal = run.opened.plan, algorithm.personal is not None
    closed = {record.round: record for record in closed_rounds(run.records)}[number]
    metric = compared_metric(run.records)
    value, where = _find_value(closed, drop_void(run.records), metric)
    return ReleaseSource(
        run=run.opened.run,
        round=number,
        plan=plan.name,
        algorithm=plan.algorithm,
        personal=personal,
        accuracy=value if metric == ACCURACY else closed.accuracy,
        measured_on=where,
        plugins=run.opened.plugins,
        project=_find_project(run.opened),
    )


def _find_project(opened: RunOpened) -> ProjectVersion | msgspec.UnsetType:
    """Return the project of a run in the version that its plugins had; unset without one."""
    if project := opened.plan.project:
        for plugin in opened.plugins or ():
            if plugin.version and plugin.distribution in (project, normalise_distribution(project)):
                return ProjectVersion(name=project, version=plugin.version)
    return msgspec.UNSET


def _find_value(closed: RoundClosed, records: Iterable[AnyRecord], metric: ComparedMetric) -> tuple[float | None, str]:
    """Return a round's accuracy, or other compared metric, and where it was measured: `server`, `devices` or empty."""
    if (value := server_value(closed, metric)) is not None:
        return value, "server"
    values = [devices_value(record, metric) for record in _evaluations(closed, records)]
    known_values = [value for value in values if value is not None]
    return (known_values[-1], "devices") if known_values else (None, "")


def _evaluations(closed: RoundClosed, records: Iterable[AnyRecord]) -> list[Evaluated]:
    """Return the devices' evaluations of a round's model."""
    evaluations = [record for record in records if isinstance(record, Evaluated) and record.round == closed.round]
    return [record for record in evaluations if not record.personal]


def _describe_task(run: StoredRun, number: int) -> ReleaseTask | msgspec.UnsetType:
    """Return a run's objective with the metrics of a round; unset for a classification without `[task]`."""
    assert run.opened
    if run.opened.plan.task_objective is None:
        return msgspec.UNSET
    objective = build_objective(run.opened.plan.objective)
    closed = {record.round: record for record in closed_rounds(run.records)}[number]
    values = closed.metrics or next((entry.metrics for entry in _evaluations(closed, drop_void(run.records))), {})
    others = (name for name in objective.metrics if name != objective.metric)
    return ReleaseTask(
        kind=objective.kind,
        metrics=(objective.metric, *others),
        direction=objective.direction,
        options=objective.spec.loss_options,
        values=dict(values or {}),
    )


def make_probes(layers: nn.Module, example: Sequence[int], what: str) -> tuple[Tensor, Tensor]:
    """Return random inputs of shape (10, ...), so that no training data leak, and the network's outputs for them.

    Args:
        example: Shape of one input, without the batch.
        what: Description of the network for error messages.

    Raises:
        ConfigError: The network does not accept the inputs, or its outputs are not finite.
    """
    inputs = torch.randn((PROBES, *example), generator=torch.Generator().manual_seed(PROBE_SEED))
    try:
        with torch.no_grad():
            outputs = layers(inputs)
    except FAULTS as error:
        raise ConfigError(
            f"{what} does not take inputs of shape {tuple(example)} ({first_line(error)}); correct --example"
        ) from error
    if not isinstance(outputs, Tensor) or not outputs.isfinite().all():
        raise ConfigError(f"{what}: its outputs are not finite numbers; choose another round")
    return inputs, outputs
