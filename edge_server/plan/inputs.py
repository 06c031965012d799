"""Input preparation of a plan, and its keys that connected boards ignore."""

from __future__ import annotations

import msgspec

from edge_server.plan.partition import PartitionPlan
from edge_server.plan.plan import Plan
from shared.data.inputs import find_inputs
from shared.data.spec import Data
from shared.errors import ConfigError
from shared.protocol.inputs import Inputs, differences

LOCAL_DATA_KEYS = ("limit", "holdout", "validation", "augment")
"""Keys of `[data]` that deal out or change what agents on this machine train on, and no board's own examples."""


def planned_inputs(plan: Plan) -> Inputs | None:
    """Return how inputs are prepared by the plan's `[data]`, or else its `[server_data]`; None where it has neither.

    Raises:
        ConfigError: Both are there, and differ.
    """
    data, server_data = (_read_inputs(section) if section else None for section in (plan.data, plan.server_data))
    bare = msgspec.structs.replace(server_data, shape=()) if server_data else None  # a wrong shape the network refuses
    if data and bare and (conflicts := list(differences(data, bare))):
        problem = "; ".join(f"{first} and {second}" for first, second in conflicts)
        raise ConfigError(f"data and server_data prepare inputs differently: {problem}; set the same in both")
    return data or server_data


def _read_inputs(data: Data) -> Inputs:
    """Return what a section says, and its files where they can be read: they may lie on the devices alone."""
    try:
        return find_inputs(data)
    except ConfigError:
        return Inputs(mean=data.mean, std=data.std)


def describe_unapplied(plan: Plan) -> str:
    """Return a line about keys of a plan that connected boards do not go by; empty where it sets none."""
    usual = Data(source="digits")
    data = plan.data
    ignored = [f"data.{key}" for key in LOCAL_DATA_KEYS if data and getattr(data, key) != getattr(usual, key)]
    ignored += ["[partition]"] if plan.partition != PartitionPlan() else []
    if not ignored:
        return ""
    noun = "does" if len(ignored) == 1 else "do"
    return (
        f"{', '.join(ignored)} of the plan {noun} not apply to connected boards: each trains on its own "
        "examples, as [data] of its own file says"
    )
