"""Coordinator: settings of a plan's allocator, and its decision for one round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from edge_server.allocation.allocator import Allocator
from edge_server.allocation.allocators.table import ALLOCATORS
from edge_server.allocation.device_facts import device_facts
from edge_server.allocation.experience import Experience
from edge_server.allocation.inputs import Case, RoundSetting
from edge_server.journal.decision import Decision, Figure
from edge_server.plan.devices import expand_devices
from edge_server.plan.optimizer import OptimizerPlan
from shared.config import escape_unprintable
from shared.errors import ConfigError
from shared.protocol.messages import Report
from shared.registry import find

UPLINK_VALUES = frozenset({"share", "up_bits_per_s"})
"""Values that devices apply with every algorithm."""
STEP_RULES = frozenset({"sgd", "adam", "adamw"})
"""Values of `hyper.optimizer`, which a user may look for in `[optimizer]`."""


def find_allocator(table: OptimizerPlan) -> Allocator[Any]:
    """Return the allocator that a plan names.

    Raises:
        ConfigError: As `shared.registry.find`.
    """
    try:
        return find(ALLOCATORS, table.name, "optimizer.name")
    except ConfigError as error:
        if table.name.lower() not in STEP_RULES:
            raise
        raise ConfigError(f"{error}; for the optimizer of training set hyper.optimizer") from error


def convert_options(table: OptimizerPlan) -> Any:
    """Convert the options of a plan's optimizer to its options type.

    Raises:
        ConfigError: The optimizer, one of its options or values, or the solver is unknown.
    """
    allocator = find_allocator(table)
    if table.solver not in allocator.solvers:
        raise ConfigError(f"optimizer: {table.name} supports only solver {', '.join(allocator.solvers)}; remove solver")
    try:
        return msgspec.convert(table.options, allocator.options)
    except msgspec.ValidationError as error:
        problem, _, key = escape_unprintable(error).partition(" - at `$.")
        where = f"options.{key.strip('`')} of {table.name}" if key else f"options of {table.name}"
        options = ", ".join(field.encode_name for field in msgspec.structs.fields(allocator.options))
        remedy = f"correct its spelling (known: {options})" if "unknown field" in problem else "correct the value"
        raise ConfigError(f"optimizer: {where}: {problem}; {remedy}") from error


def unused_values(table: OptimizerPlan, algorithm: str, uses: frozenset[str]) -> str:
    """Return a warning about decided values that the algorithm ignores; empty if it uses all.

    Args:
        uses: Names of the values that the algorithm uses.
    """
    decides = find_allocator(table).decides
    unused = [name for name in decides if name not in uses | UPLINK_VALUES]
    if not unused:
        return ""
    others = " or ".join(name for name, allocator in ALLOCATORS.items() if uses.intersection(allocator.decides))
    is_paced = not UPLINK_VALUES.isdisjoint(decides)
    paced = "; uploads still respect their shares of the uplink" if is_paced else ""
    return (
        f"optimizer {table.name!r} decides {', '.join(unused)}, which algorithm {algorithm!r} does not use: devices "
        f"train as without it{paced}; {f'choose optimizer {others}, or ' if others else ''}remove [optimizer]"
    )


def round_case(setting: RoundSetting, experience: Experience, reports: Mapping[str, Report]) -> Case:
    """Build the case of a round from settings, journal and the devices' last reports."""
    table = setting.plan.optimizer
    assert table is not None
    allocator, options = find_allocator(table), convert_options(table)
    planned = {device.name: device for device in expand_devices(setting.plan.device)}
    appearance = list(dict.fromkeys([*planned, *experience.order, *setting.devices]))
    limits = allocator.limits(options, setting)
    figures = {
        device: allocator.figures(options, device_facts(device, reports, experience, planned.get(device)), limits)
        for device in setting.devices
    }
    limits = allocator.spread(options, setting, limits, figures)
    for device, values in setting.fixed_values.items():
        figures[device] = {**figures[device], **{name: Figure(value, "measured") for name, value in values.items()}}
    return Case(
        setting.devices, limits, figures, setting.ladder, {device: place for place, device in enumerate(appearance)}
    )


def decide(table: OptimizerPlan, case: Case) -> Decision:
    """Decide one round; does not fail whatever devices report."""
    decision = find_allocator(table).decide(convert_options(table), table.solver, case)
    decision = msgspec.structs.replace(
        decision,
        optimizer=table.name,
        limits=dict(case.limits),
        ladder=list(case.ladder),
        enough={name: value for name, value in decision.enough.items() if math.isfinite(value)},
    )
    return _drop_infinite(decision)


def _drop_infinite(decision: Decision) -> Decision:
    """Drop infinite figures, such as an upload without a link, which a JSON record cannot store."""
    if b"null" not in msgspec.json.encode(decision):
        return decision
    devices = {
        device: msgspec.structs.replace(
            device_decision,
            figures={name: figure for name, figure in device_decision.figures.items() if math.isfinite(figure.value)},
        )
        for device, device_decision in decision.devices.items()
    }
    return msgspec.json.decode(msgspec.json.encode(msgspec.structs.replace(decision, devices=devices)), type=Decision)
