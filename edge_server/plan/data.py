"""Data sets of a plan: paths, fallback, device shares, test set."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from edge_server.plan.devices import DevicePlan, resolve_trace_paths
from edge_server.plan.plan import Plan
from shared.data.spec import Client, Data, Dirichlet, Even, Partition, Shards
from shared.errors import ConfigError

log = logging.getLogger(__name__)


def resolve_data(plan: Plan, data_root: Path) -> Plan:
    """Resolve data and trace paths relative to `data_root`; apply the fallback if the data do not exist."""
    plan = msgspec.structs.replace(plan, device=resolve_trace_paths(plan.device, data_root))
    if plan.fallback and not (data_root / planned_data(plan).path).exists():
        path = data_root / planned_data(plan).path
        log.warning("%s does not exist, training on %s instead", path, plan.fallback.data.source)
        plan = apply_fallback(plan)
    server_data, data = _resolve_path(plan.server_data, data_root), _resolve_path(plan.data, data_root)
    model = plan.model
    if model.weights:
        model = msgspec.structs.replace(model, weights=str(data_root / model.weights))
    return msgspec.structs.replace(plan, data=data, server_data=server_data, model=model, fallback=None)


def _resolve_path(data: Data | msgspec.UnsetType, data_root: Path) -> Data | msgspec.UnsetType:
    return msgspec.structs.replace(data, path=str(data_root / data.path)) if data and data.path else data


def planned_data(plan: Plan) -> Data:
    """Return the plan's data without the examples drawn for training on the server.

    Raises:
        ConfigError: The plan has no `[data]`.
    """
    if not plan.data:
        raise ConfigError(
            f"plan {plan.name!r} has no [data], which agents on this machine, replay and the server's evaluation need; "
            "add it, or run the plan with connected devices"
        )
    server_data = plan.server_data
    if server_data and server_data.drawn and is_same_set(server_data, plan.data):
        return msgspec.structs.replace(plan.data, without=server_data.drawn)
    return plan.data


def is_same_set(first: Data, second: Data) -> bool:
    """Compare source, path, split and limit: equal if both read the same examples."""
    return (first.source, first.path, first.split, first.limit) == (
        second.source,
        second.path,
        second.split,
        second.limit,
    )


def require_data(plan: Plan, data_root: Path) -> None:
    """Check that the data sets of a plan with resolved paths exist.

    Raises:
        ConfigError: The message names `data_root`.
    """
    for key, data in (("data", plan.data), ("server_data", plan.server_data)):
        if data and data.path and not Path(data.path).exists():
            raise ConfigError(
                f"{key}.path: {data.path} does not exist; relative paths start at the folder of a project's plan, else "
                f"at data_root, here {data_root}: correct {key}.path, --data-root or data_root of the server's file"
            )


def apply_fallback(plan: Plan) -> Plan:
    """Return the plan with the sections of its fallback."""
    sections = plan.fallback and {
        name: section for name, section in msgspec.structs.asdict(plan.fallback).items() if section
    }
    return msgspec.structs.replace(plan, **(sections or {}))


def device_data(plan: Plan, fleet: Sequence[DevicePlan], index: int) -> Data:
    """Return the partition of the data for the `index`-th device of a local fleet."""
    part, parts = plan.partition, len(fleet)
    place = {"parts": parts, "index": index, "seed": part.seed}
    match part.kind:
        case "none":
            return planned_data(plan)
        case "dirichlet":
            split: Partition = Dirichlet(alpha=part.alpha, min_examples=part.min_examples, **place)
        case "shards":
            split = Shards(shards_per_device=part.shards_per_device, **place)
        case "even":
            split = Even(**place)
        case "client":
            split = Client(client=fleet[index].name)
    return msgspec.structs.replace(planned_data(plan), partition=split)


def test_data(plan: Plan) -> Data:
    """Return the server's test set: the whole test split, with labels even if devices read none."""
    absent = dict.fromkeys(("labels", "drawn", "without"), msgspec.UNSET)
    data = planned_data(plan)
    return msgspec.structs.replace(data, split="test", partition=None, holdout=0.0, validation=0.0, **absent)
