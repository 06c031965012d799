"""Check the data of a plan on this machine: readability, fit of network and task, a share for each device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from edge_server.journal.outcome import name_some
from edge_server.plan.data import device_data, planned_data, test_data
from edge_server.plan.devices import DevicePlan
from edge_server.plan.plan import Plan
from shared.data.examples import Examples
from shared.data.inputs import read_preparation
from shared.data.load import as_examples
from shared.data.partition import select_share, split
from shared.data.sources.arrays import ReadPart
from shared.data.sources.read import read_part, select_examples
from shared.data.spec import NONE, TABLES, Data
from shared.data.summary import is_whole, summarise_part
from shared.errors import ConfigError
from shared.models.build import build_initial
from shared.models.evaluate import TRIED, output_shape, require_matching_examples, score
from shared.objectives.fit import require_fit
from shared.objectives.training import TrainingObjective, build_training_objective
from shared.protocol.objective import CLASS_KINDS

MOST_VALUES = 1 << 20
"""Input values to read of each data set, which takes about a second for the slowest source."""


class DataCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a data set of the plan, of which a bounded part was read.

    Attributes:
        section: Section of the plan, or `test data`.
        finding: Examples, classes or targets, shape and values; or why nothing was read.
    """

    section: str
    finding: str
    notes: tuple[str, ...] = ()


def require_fitting_data(plan: Plan, fleet: Sequence[DevicePlan] = (), *, is_shared: bool) -> None:
    """Refuse a run by the data on this machine; arguments and errors are those of `check_data`."""
    for _ in check_data(plan, fleet, is_shared=is_shared):
        pass


def check_data(plan: Plan, fleet: Sequence[DevicePlan], *, is_shared: bool = True) -> Iterator[DataCheck]:
    """Read a part of each data set on this machine, and try network, loss and metrics on it.

    Args:
        fleet: Devices that share `[data]`; empty if unknown.
        is_shared: Whether devices read `[data]`; otherwise they have their own, and it need not be readable.

    Raises:
        ConfigError: Data cannot be read, or do not fit the network, the task or the devices.
    """
    sections = {"data": planned_data(plan)} if plan.data else {}
    if plan.data and plan.evaluation.every:
        sections["test data"] = test_data(plan)
    if plan.server_data:
        sections["server_data"] = plan.server_data
    for section, data in sections.items():
        if data.source == NONE:
            continue
        if data.path and not Path(data.path).exists():
            require_known_fit(plan, _declared_shape(data), place=section)
            yield DataCheck(section=section, finding=f"{data.path} is not on this machine, and was not read")
            continue
        try:
            part = read_part(data, MOST_VALUES)
        except ConfigError as error:
            if (data.path or not data.is_custom) and (is_shared or section != "data"):
                raise ConfigError(f"{section}: {error}") from error
            yield DataCheck(section=section, finding="not read", notes=(str(error),))  # may exist on boards alone
            continue
        yield _check_part(plan, section, data, part, fleet if section == "data" else ())


def _check_part(plan: Plan, section: str, data: Data, part: ReadPart, fleet: Sequence[DevicePlan]) -> DataCheck:
    summary = summarise_part(data, part, MOST_VALUES)
    objective, layers = build_training_objective(plan.objective), build_initial(plan.model, plan.seed).layers
    examples = as_examples(part.arrays, data)
    require_matching_examples(layers, {}, examples, section, objective)
    if data.is_labelled or objective.reconstructs:
        _require_finite_loss(layers, examples, objective)
    notes = _check_shares(plan, data, part, fleet) if fleet else ()
    return DataCheck(section=section, finding=summary.finding, notes=(*summary.notes, *notes))


def _require_finite_loss(layers: nn.Module, examples: Examples, objective: TrainingObjective) -> None:
    first = examples.subset(torch.arange(min(TRIED, len(examples))))
    scored = score(layers, dict(layers.state_dict()), first, objective)
    if scored.counted and not math.isfinite(scored.loss):
        raise ConfigError(
            f"task.loss: {objective.loss_name!r} is {scored.loss} on the first {len(first)} examples, before any "
            "training; correct the loss, the network's outputs or the examples"
        )


def _check_shares(plan: Plan, data: Data, part: ReadPart, fleet: Sequence[DevicePlan]) -> list[str]:
    """Refuse a device without a share of the examples; return notes where only a part of these was read."""
    if plan.partition.kind == "none":
        return []
    partitions = [device_data(plan, fleet, index).partition for index in range(len(fleet))]
    if is_whole(data, part, MOST_VALUES):
        assert partitions[0]
        shares = split(select_examples(part.arrays, data), partitions[0])
        for device, partition in zip(fleet, partitions, strict=True):
            assert partition
            try:
                select_share(shares, partition)
            except ConfigError as error:
                raise ConfigError(f"data: device {device.name}: {error}") from error
        return []
    clients = part.arrays.clients if plan.partition.kind == "client" else None
    absent = [] if clients is None else [device.name for device in fleet if device.name not in set(clients)]
    if not absent:
        return []
    return [f"no example of {name_some(absent)} among those read; a device that has none further on cannot train"]


def _declared_shape(data: Data) -> tuple[int, ...]:
    """Return the shape of an input as far as a section tells it without its files; empty if it does not."""
    if data.source in TABLES:
        columns = len(data.feature_columns or ())
        return (columns, data.window.length) if columns and data.window else (columns,) * bool(columns)
    try:
        return read_preparation(data).shape
    except ConfigError:
        return ()


def require_known_fit(plan: Plan, shape: Sequence[int], classes: int = 0, place: str = "") -> None:
    """Refuse a network that does not fit examples of which only the shape is known.

    Args:
        shape: Of one input; nothing is checked if it is empty.
        classes: Number of the devices' classes; 0 if unknown.
        place: Section that the examples come from, for messages.

    Raises:
        ConfigError: It does not take such inputs, or its outputs do not fit the targets that the plan names.
    """
    if not shape:
        return
    inputs, place = torch.zeros((1, *shape)), f"{place}, model" if place else "model"
    outputs = output_shape(build_initial(plan.model, plan.seed).layers, {}, inputs, place)
    targets = _known_targets(plan, inputs, classes)
    if targets is not None:
        require_fit(build_training_objective(plan.objective), outputs, inputs, targets, place)


def _known_targets(plan: Plan, inputs: Tensor, classes: int) -> Tensor | None:
    """Return one target with the highest class, or the shape, that is known; None if no shape is."""
    data, kind = plan.data or None, plan.objective.kind
    if kind in CLASS_KINDS:
        highest = max(1, classes, len(data.classes or ()) if data else 0) - 1
        return torch.full((1, *inputs.shape[2:]) if kind == "segmentation" else (1,), highest)
    if data is None or not data.target_columns:
        return None
    return torch.zeros(1, len(data.target_columns) * max(1, data.window.horizon if data.window else 1))
