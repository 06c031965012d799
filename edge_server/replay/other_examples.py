"""Substitute examples for a recorded run whose devices kept theirs.

Decisions, times, bytes and joules of a replay follow from the record, not from the examples. The accuracy is that of
the substitute data set; with synthetic examples it is meaningless.
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
from edge_server.plan.partition import PartitionPlan
from edge_server.plan.plan import Plan
from edge_server.replay.trace.trace import Trace
from shared.data.sources.read import SOURCES
from shared.data.spec import Data
from shared.errors import ConfigError
from shared.models.build import build_initial
from shared.registry import find

# Partition kinds under which every device has examples of its own.
UNSHARED_KINDS = ("none", "client")
# Number of examples of a device for which none was recorded.
USUAL_EXAMPLES = 32
REMEDY = "give --data SOURCE=PATH for others, or --synthetic for decisions, times, bytes and joules alone"


def parse_data(text: str) -> Data:
    """Parse `SOURCE=PATH`, such as `npz=examples.npz`, or `digits` alone.

    Raises:
        ConfigError: The source is unknown, or lacks its path.
    """
    source, _, path = text.partition("=")
    try:
        find(SOURCES, source, "source")
        return msgspec.convert({"source": source, "path": str(Path(path).resolve()) if path else ""}, Data)
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"--data {text}: {error}; give SOURCE=PATH, such as npz=examples.npz, or digits") from error


def parse_shape(text: str) -> tuple[int, ...]:
    """Parse the shape of one input: `1x28x28` gives (1, 28, 28), an empty text gives ().

    Raises:
        ConfigError: The text is not a shape.
    """
    if not text:
        return ()
    parts = text.split("x")
    if not all(part.isdecimal() and 0 < int(part) <= 1 << 20 for part in parts):
        raise ConfigError(f"--synthetic {text}: give the shape of one input, such as 1x28x28 or 12")
    return tuple(map(int, parts))


def replace_data(plan: Plan, data: Data) -> Plan:
    """Return a plan that trains on other data, shared evenly if the devices had examples of their own."""
    partition = PartitionPlan(kind="even") if plan.partition.kind in UNSHARED_KINDS else plan.partition
    return msgspec.structs.replace(plan, data=data, partition=partition, fallback=None)


@contextmanager
def synthetic_data(plan: Plan, trace: Trace, shape: tuple[int, ...], folder: Path) -> Iterator[Plan]:
    """Yield a plan that trains on random numbers of the recorded shape and count.

    Args:
        shape: Shape of one input, channels first.
        folder: Holds the examples' file while the block lasts.

    Raises:
        ConfigError: The shape is unknown, or does not fit the plan's network.
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
    # The name is part of the plan, so it must be the same for the same replay.
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
    """Return the number of outputs of the plan's network."""
    layers = build_initial(plan.model, plan.seed).layers.eval()
    try:
        with torch.no_grad():
            outputs = layers(torch.zeros((1, *shape)))
    except RuntimeError as error:
        size = "x".join(map(str, shape))
        raise ConfigError(f"--synthetic: the plan's network does not accept inputs of shape {size}: {error}") from error
    return math.prod(outputs.shape[1:])


def recorded_shape(records: Iterable[AnyRecord]) -> tuple[int, ...]:
    """Return the shape of one input as reported by the devices; empty if none did."""
    inputs_of_rounds = (record.inputs for record in records if isinstance(record, RoundOpened) and record.inputs)
    return next((inputs.shape for inputs in inputs_of_rounds if inputs.shape), ())
