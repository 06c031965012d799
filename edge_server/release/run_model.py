"""The model of a run as it is evaluated: which round's, its parameters, what it takes, what its classes are called."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from edge_server.journal import checkpoints
from edge_server.journal.records import AnyRecord, Evaluated, RoundClosed, RoundOpened, closed_rounds, drop_void
from edge_server.journal.runs import BEST, CHECKPOINTS, FOLDER, Run, best_path
from edge_server.plan.data import test_data
from edge_server.plan.inputs import planned_inputs
from edge_server.plan.plan import Plan
from shared.algorithms import ALGORITHMS
from shared.algorithms.base import Algorithm, evaluated_parameters
from shared.data.classes import normalise_class_names
from shared.data.examples import Examples
from shared.data.load import load
from shared.errors import ConfigError, WireError
from shared.models.base import Model
from shared.models.build import build_blank, build_zeroed
from shared.protocol.inference.release import Preprocessing, ReleaseSource
from shared.protocol.inputs import Inputs
from shared.registry import FAULTS, build
from shared.tensors import file
from shared.tensors.tree import Tree, check_like

log = logging.getLogger(__name__)

PROBES, PROBE_SEED = 10, 0
PICTURE_EXTENTS = 3
LAYOUTS = {1: "NF", 2: "NCL", 3: "NCHW"}
"""By the number of extents of one input: features; channels and length; channels, height and width."""


@dataclass(frozen=True)
class RunModel:
    """A trained network.

    Attributes:
        model: With its parameters, as it evaluates.
        tree: The same parameters and buffers, by the network's names; all finite.
        example: Shape of one input, without the batch.
        classes: Names of the classes; empty for numbers.
        preprocessing: What was done to the examples.
        source: Which run and round.
    """

    plan: Plan
    model: Model
    tree: Tree
    example: tuple[int, ...]
    classes: tuple[str, ...]
    preprocessing: Preprocessing
    source: ReleaseSource

    @property
    def what(self) -> str:
        """What messages call it."""
        return f"model {self.plan.model.name!r} of run {self.source.run}, round {self.source.round}"


def read_model(run: Run, number: int | None = None, example: Sequence[int] = ()) -> RunModel:
    """Return the model of a run after a round.

    Args:
        number: After which round; None for the most accurate that the run keeps, or the last where its plan keeps that.
        example: Shape of one input; empty for that of the plan's data, or else what the network is made for.

    Raises:
        ConfigError: The run keeps no such model, or no whole one; the model has numbers that are none, or does not take
            such inputs; it is of a network that this process may not import.
        CorruptFile: The checkpoint is damaged.
    """
    start = run.opened
    if start is None:
        raise ConfigError(f"run {run.folder.name} never began, so it has no model")
    plan = start.plan
    algorithm = build(ALGORITHMS, plan.algorithm, "algorithm")
    number = number or _usual_round(run, plan)
    try:
        state = file.load(_kept_path(run, number))
    except FileNotFoundError as error:  # its server went on between the look and this
        raise ConfigError(f"run {run.folder.name} keeps its model of round {number} no more; try again") from error
    tree = _whole(evaluated_parameters(algorithm, state), build_blank(plan.model), run, number)
    model = build_zeroed(plan.model)
    model.layers.load_state_dict(tree)
    model.layers.eval()
    examples = None if example else test_examples(plan)
    shape = tuple(example) or (() if examples is None else tuple(examples.inputs.shape[1:])) or model.example
    if not shape:
        raise ConfigError(f"model {plan.model.name!r} does not say what examples it is made for; give --example")
    classes = _class_names(plan, examples, run.records)
    source = _source(run, algorithm, number)
    prepared = _preprocessing(_inputs(plan, run.records), shape)
    return RunModel(plan, model, dict(model.layers.state_dict()), shape, classes, prepared, source)


def _usual_round(run: Run, plan: Plan) -> int:
    """Return after which round the model is that stands for the run."""
    rounds = kept_rounds(run)
    if not rounds:
        raise ConfigError(f"run {run.folder.name} keeps no model: no round of it was aggregated, or it was imported")
    closed = [record for record in closed_rounds(run.records) if record.round in rounds]
    measured = [(record.accuracy, record.round) for record in closed if record.accuracy is not None]
    if plan.evaluation.keep == "best" and measured:
        return max(measured)[1]
    return rounds[-1]


def kept_rounds(run: Run) -> list[int]:
    """Return after which rounds the models are kept, in order; those of rounds that are void are left out."""
    folder = run.folder / FOLDER
    names = [path.name for pattern in (CHECKPOINTS, BEST) for path in folder.glob(pattern)]
    numbers = {int(digits) for name in names if (digits := name.rpartition("-")[2].partition(".")[0]).isdecimal()}
    closed = {record.round for record in closed_rounds(run.records) if record.outcome == "aggregated"}
    return sorted((numbers | {checkpoints.good_number(folder)}) & closed)


def _kept_path(run: Run, number: int) -> Path:
    rounds = kept_rounds(run)
    if number not in rounds:
        some = ", ".join(map(str, rounds)) or "none"
        raise ConfigError(f"run {run.folder.name} keeps no model of round {number}; --round may be: {some}")
    folder = run.folder / FOLDER
    best = best_path(folder, number)
    return best if best.exists() else checkpoints.state_path(folder, number)


def _whole(tree: Tree, like: Model, run: Run, number: int) -> Tree:
    """Return the network's own leaves of a state, all there, of its shapes and finite."""
    expected = like.tree()
    if missing := sorted(expected.keys() - tree.keys()):
        raise ConfigError(
            f"run {run.folder.name}: its server holds no whole network, {len(missing)} of {len(expected)} tensors, such as "
            f"{missing[0]!r}, are each device's own"
        )
    state = {name: tree[name] for name in expected}
    try:
        check_like(state, expected)
    except WireError as error:
        remedy = "; another round may do, see --round" if error.reason == "not-finite" else ""
        raise ConfigError(f"run {run.folder.name}, round {number}: parameter {error}{remedy}") from error
    return state


def test_examples(plan: Plan) -> Examples | None:
    """Return the server's test data, which say what an input looks like; None where it has none."""
    if not plan.data:
        return None
    try:
        return load(test_data(plan))
    except ConfigError as error:
        log.warning("the run's examples are not here (%s): inputs are taken to be what the network is made for", error)
        return None


def _class_names(plan: Plan, examples: Examples | None, records: Iterable[AnyRecord]) -> tuple[str, ...]:
    """Return what the classes are called by the plan, by the server's examples, or as devices agreed."""
    if plan.data and plan.data.classes:
        return normalise_class_names(plan.data.classes)
    if examples is not None and examples.classes:
        return normalise_class_names(examples.classes)
    agreed = [record.classes for record in records if isinstance(record, RoundOpened) and record.classes]
    return agreed[-1] if agreed else ()


def _inputs(plan: Plan, records: Iterable[AnyRecord]) -> Inputs | None:
    """Return how inputs were prepared, as the devices agreed or the plan's data say; None where neither tells."""
    agreed = [record.inputs for record in records if isinstance(record, RoundOpened) and record.inputs]
    return agreed[-1] if agreed else planned_inputs(plan)


def _preprocessing(inputs: Inputs | None, example: Sequence[int]) -> Preprocessing:
    is_picture = len(example) == PICTURE_EXTENTS
    size, layout = tuple(example[1:]) if is_picture else (), LAYOUTS.get(len(example), "")
    if inputs is None:
        return Preprocessing(size=size, layout=layout)
    fields: dict[str, Any] = {}
    if inputs.scale is not None:
        fields = {"byte_scale": inputs.scale, "dtype": "float32" if inputs.scale == 1 else "uint8"}
    fields |= {"mean": inputs.mean, "std": inputs.std, "features": inputs.features}
    return Preprocessing(size=size, layout=layout, **fields)


def _source(run: Run, algorithm: Algorithm, number: int) -> ReleaseSource:
    assert run.opened
    plan, personal = run.opened.plan, algorithm.personal is not None
    closed = {record.round: record for record in closed_rounds(run.records)}[number]
    accuracy, where = _accuracy(closed, drop_void(run.records))
    return ReleaseSource(
        run=run.opened.run,
        round=number,
        plan=plan.name,
        algorithm=plan.algorithm,
        personal=personal,
        accuracy=accuracy,
        measured_on=where,
    )


def _accuracy(closed: RoundClosed, records: Iterable[AnyRecord]) -> tuple[float | None, str]:
    """Return what was measured of the model after a round, and on whose examples."""
    if closed.accuracy is not None:
        return closed.accuracy, "server"
    on_devices = [record for record in records if isinstance(record, Evaluated) and record.round == closed.round]
    accuracies = [record.accuracy for record in on_devices if not record.personal and record.accuracy is not None]
    return (accuracies[-1], "devices") if accuracies else (None, "")


def make_probes(layers: nn.Module, example: Sequence[int], what: str) -> tuple[Tensor, Tensor]:
    """Return made-up inputs of shape (10, ...), no example of anybody's, and what a network makes of them.

    Args:
        example: Shape of one input.
        what: The network, for the error.

    Raises:
        ConfigError: It does not take them, or makes numbers of them that are none.
    """
    inputs = torch.randn((PROBES, *example), generator=torch.Generator().manual_seed(PROBE_SEED))
    try:
        with torch.no_grad():
            outputs = layers(inputs)
    except FAULTS as error:
        problem = str(error).partition("\n")[0]
        raise ConfigError(
            f"{what} does not take inputs of shape {tuple(example)} ({problem}); correct --example"
        ) from error
    if not isinstance(outputs, Tensor) or not outputs.isfinite().all():
        raise ConfigError(f"{what}: its outputs are no finite numbers")
    return inputs, outputs
