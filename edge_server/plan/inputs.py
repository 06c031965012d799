"""Input preparation of a plan, and the keys that connected devices ignore."""

from __future__ import annotations

import msgspec

from edge_server.plan.partition import PartitionPlan
from edge_server.plan.plan import Plan
from shared.data.inputs import read_preparation
from shared.data.spec import Data
from shared.errors import ConfigError
from shared.protocol.inputs import Inputs, differences

LOCAL_DATA_KEYS = ("limit", "holdout", "holdout_by", "validation", "augment", "growing", "recent")
"""Keys of `[data]` that apply to agents on this machine, but not to the local examples of connected devices."""


def planned_inputs(plan: Plan) -> Inputs | None:
    """Return the input preparation of `[data]`, or else of `[server_data]`; None without both.

    Raises:
        ConfigError: They differ.
    """
    data, server_data = (_read_inputs(section) if section else None for section in (plan.data, plan.server_data))
    bare = msgspec.structs.replace(server_data, shape=()) if server_data else None  # the network rejects a wrong shape
    if data and bare and (conflicts := list(differences(data, bare))):
        problem = "; ".join(f"{first} and {second}" for first, second in conflicts)
        raise ConfigError(f"data and server_data prepare inputs differently: {problem}; set the same in both")
    return data or server_data


def _read_inputs(data: Data) -> Inputs:
    """Read the inputs of a section; without its files, which may exist only on the devices, use mean and std alone."""
    try:
        return read_preparation(data)
    except ConfigError:
        return Inputs(mean=data.mean, std=data.std)


def describe_unapplied(plan: Plan) -> str:
    """Return a line about keys of the plan that connected devices ignore; empty if it sets none."""
    usual = Data(source="digits")
    data = plan.data
    ignored = [f"data.{key}" for key in LOCAL_DATA_KEYS if data and getattr(data, key) != getattr(usual, key)]
    ignored += ["[partition]"] if plan.partition != PartitionPlan() else []
    if not ignored:
        return ""
    noun = "does" if len(ignored) == 1 else "do"
    return (
        f"{', '.join(ignored)} of the plan {noun} not apply to connected devices: each trains on local "
        "examples, set by [data] in its agent.toml"
    )
