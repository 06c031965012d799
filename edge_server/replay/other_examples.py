"""Examples in place of those that the devices of a recorded run trained on, which are not on this machine.

Decisions, times, bytes and joules of a replay follow from the record, whatever the examples are. With a data set of
the user's the accuracy is that of this data; with synthetic examples it means nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import torch

from edge_server.journal.records import AnyRecord, RoundOpened
from edge_server.plan.plan import Plan
from edge_server.plan.sections import PartitionPlan
from edge_server.replay.trace.trace import Trace
from shared.data.spec import Data
from shared.errors import ConfigError
from shared.models.build import build_initial

UNSHARED_KINDS = ("none", "client")
"""Of a plan's partition: how devices with examples of their own share none, or by their names."""
USUAL_EXAMPLES = 32
"""Of a device of which nobody recorded how many it had."""
REMEDY = "give --data SOURCE=PATH for others, or --synthetic for decisions, times, bytes and joules alone"


def parse_data(text: str) -> Data:
    """Return the data set that `SOURCE=PATH` names, such as `npz=examples.npz`, or `digits` alone.

    Raises:
        ConfigError: There is no such source, or it needs a path.
    """
    source, _, path = text.partition("=")
    try:
        return msgspec.convert({"source": source, "path": str(Path(path).resolve()) if path else ""}, Data)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--data {text}: {error}; give SOURCE=PATH, such as npz=examples.npz, or digits") from error


def parse_shape(text: str) -> tuple[int, ...]:
    """Return the shape of one input, such as (1, 28, 28) of `1x28x28`; none of an empty text.

    Raises:
        ConfigError: It is no shape.
    """
    if not text:
        return ()
    parts = text.split("x")
    if not all(part.isdecimal() and 0 < int(part) <= 1 << 20 for part in parts):
        raise ConfigError(f"--synthetic {text}: give the shape of one input, such as 1x28x28 or 12")
    return tuple(map(int, parts))


def replace_data(plan: Plan, data: Data) -> Plan:
    """Return a plan that trains on other data, which its devices share evenly where they had their own."""
    partition = PartitionPlan(kind="even") if plan.partition.kind in UNSHARED_KINDS else plan.partition
    return msgspec.structs.replace(plan, data=data, partition=partition, fallback=None)


@contextmanager
def synthetic_data(plan: Plan, trace: Trace, shape: tuple[int, ...], folder: Path) -> Iterator[Plan]:
    """Lend a plan whose examples are random numbers of the recorded shape, as many as were trained on.

    Args:
        shape: Of one input, channels first.
        folder: Of runs, for the file of the examples while the block lasts.

    Raises:
        ConfigError: Nobody knows the shape, or the plan's network does not take it.
    """
    if not shape:
        raise ConfigError(
            f"{trace.header.run}: the shape of an example was not recorded; name it: --synthetic 1x28x28, or 12 for a "
            "table of 12 columns"
        )
    had = {task.device: task.examples for task in trace.tasks if task.purpose == "train" and task.examples}
    clients = [device.name for device in trace.header.devices for _ in range(had.get(device.name) or USUAL_EXAMPLES)]
    count = len(clients)
    random = np.random.default_rng(plan.seed)
    inputs = random.standard_normal((count, *shape), dtype=np.float32)
    labels = np.arange(count) % _classes(plan, shape)
    size = "x".join(map(str, shape))
    # Of the same name each time, so that the record of the same replay is the same.
    path = folder.resolve() / f".synthetic-{size}-{count}-{plan.seed}.npz"
    try:
        np.savez(path, x=inputs, y=labels, client=np.array(clients, dtype=str))
        data = Data(source="npz", path=str(path), client_column="client")
        yield msgspec.structs.replace(
            plan,
            data=data,
            partition=PartitionPlan(kind="client"),
            evaluation=msgspec.structs.replace(plan.evaluation, every=0),
            fallback=None,
        )
    finally:
        path.unlink(missing_ok=True)


def _classes(plan: Plan, shape: tuple[int, ...]) -> int:
    """Return how many outputs the plan's network has."""
    layers = build_initial(plan.model, plan.seed).layers.eval()
    try:
        with torch.no_grad():
            outputs = layers(torch.zeros(1, *shape))
    except RuntimeError as error:
        size = "x".join(map(str, shape))
        raise ConfigError(f"--synthetic: the plan's network takes no inputs of shape {size}: {error}") from error
    return math.prod(outputs.shape[1:])


def recorded_shape(records: Iterable[AnyRecord]) -> tuple[int, ...]:
    """Return the shape of one input as the devices told it; empty where none did."""
    inputs_of_rounds = (record.inputs for record in records if isinstance(record, RoundOpened) and record.inputs)
    return next((inputs.shape for inputs in inputs_of_rounds if inputs.shape), ())
