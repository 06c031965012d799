"""Plan checks across sections: names, counts, labels."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from edge_server.plan.data import is_same_set
from edge_server.plan.devices import check_devices, expand_devices
from edge_server.plan.emulation import check_emulation
from edge_server.plan.plan import Plan
from edge_server.plan.sites import check_sites
from shared.data.spec import TABLES
from shared.errors import ConfigError
from shared.protocol.topics import check_name

BY_CLASS = ("dirichlet", "shards")
"""Kinds of `[partition]` that deal examples by class."""
TARGETS: Mapping[str, tuple[str, ...]] = {
    "classification": ("class",),
    "anomaly": ("class",),
    "segmentation": ("mask",),
    **dict.fromkeys(("multilabel", "regression", "forecast"), ("values",)),
}
"""Kinds of targets of each kind of task."""


def check_structure(plan: Plan, path: Path) -> None:
    """Check names and counts across the sections of the plan in `path`; builds nothing.

    Raises:
        ConfigError: A name is invalid or used twice, or a count is out of range.
    """
    check_name(plan.name, f"{path}: name")
    check_devices(plan.device, path)
    if plan.rounds < 1:
        raise ConfigError(f"{path}: rounds: {plan.rounds}; give at least 1")
    if plan.sites:
        names = [device.name for device in expand_devices(plan.device)]
        check_sites(plan.sites, names, plan.rounds, plan.cohort.min_devices, path)
    _check_labels(plan, path)
    _check_targets(plan, path)
    _check_normalise(plan, path)
    if plan.emulation:
        check_emulation(plan.emulation, expand_devices(plan.device), path)
    if plan.local < 0:
        raise ConfigError(f"{path}: local: {plan.local}; set at least 1, or remove it for the connected fleet")


def _check_labels(plan: Plan, path: Path) -> None:
    """Reject server examples without labels, or that cannot be separated from those of the devices."""
    server_data, data = plan.server_data, plan.data
    if (server_data and server_data.without) or (data and data.without):
        raise ConfigError(f"{path}: data.without is derived from [server_data] drawn; remove it")
    if server_data and server_data.labels:
        raise ConfigError(f"{path}: server_data.labels is set, but the server needs all labels; remove it")
    if (
        server_data
        and data
        and server_data.drawn
        and not is_same_set(server_data, data)
        and server_data.path == data.path
    ):
        wrong = next(name for name in ("source", "split", "limit") if getattr(server_data, name) != getattr(data, name))
        raise ConfigError(
            f"{path}: server_data.{wrong} must equal that of data, so that drawn examples can be left out there"
        )


def _check_targets(plan: Plan, path: Path) -> None:
    """Reject data whose targets are not those of the task, or that cannot be dealt by class."""
    kind = plan.objective.kind
    for key, data in (("data", plan.data), ("server_data", plan.server_data)):
        if not data or not data.is_labelled or data.target_kind in TARGETS.get(kind, (data.target_kind,)):
            continue
        expected, is_table = TARGETS[kind][0], data.source in TABLES
        keys = {"class": "label_column" if is_table else "targets", "mask": "masks"}
        remedy = keys.get(expected, "target_columns" if is_table else "targets")
        raise ConfigError(
            f"{path}: {key}: its targets are of the kind {data.target_kind!r}, but task.kind is {kind!r}, which needs "
            f"{expected!r}; correct task.kind or {key}.{remedy}"
        )
    if plan.data and plan.data.target_kind != "class" and plan.partition.kind in BY_CLASS:
        raise ConfigError(
            f"{path}: partition.kind: {plan.partition.kind!r} deals examples by class, but the targets of [data] are "
            "not classes; set it to even, client or none"
        )


def _check_normalise(plan: Plan, path: Path) -> None:
    """Reject a measured mean and deviation where sites or the server's examples would have their own."""
    if plan.server_data and plan.server_data.normalise:
        raise ConfigError(f"{path}: server_data.normalise: set it in [data], it applies to both; remove it here")
    if plan.data and plan.data.normalise and plan.sites:
        raise ConfigError(
            f"{path}: data.normalise: sites mix their models, and each would measure its own mean and std; set "
            "data.mean and data.std"
        )
