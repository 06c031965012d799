"""Coordinator: registry of allocators, and the decision for one round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from edge_server.allocation.allocator import Allocator
from edge_server.allocation.allocators.bandwidth import BANDWIDTH
from edge_server.allocation.allocators.clusters import CLUSTERS
from edge_server.allocation.allocators.hcef import HCEF
from edge_server.allocation.allocators.keep_ratio import KEEP_RATIO
from edge_server.allocation.device_facts import device_facts
from edge_server.allocation.experience import Experience
from edge_server.allocation.inputs import Case, RoundSetting
from edge_server.journal.decision import Decision, Figure
from edge_server.plan.devices import expand_devices
from edge_server.plan.optimizer import OptimizerPlan
from shared.config import escape_unprintable
from shared.errors import ConfigError
from shared.protocol.messages import Report
from shared.spelling import guess

ALLOCATORS: Mapping[str, Allocator[Any]] = {
    "bandwidth": BANDWIDTH,
    "clusters": CLUSTERS,
    "hcef": HCEF,
    "keep_ratio": KEEP_RATIO,
}
"""Every optimizer by the name that it has in a plan."""

UPLINK_VALUES = frozenset({"share", "up_bits_per_s"})
"""Values that a device keeps to whatever it trains."""


def find_allocator(table: OptimizerPlan) -> Allocator[Any]:
    """Return who decides.

    Raises:
        ConfigError: There is nobody of that name.
    """
    if table.name not in ALLOCATORS:
        names, suggestion = ", ".join(sorted(ALLOCATORS)), guess(table.name, ALLOCATORS)
        raise ConfigError(f"optimizer.name: unknown optimizer {table.name!r}; known: {names}{suggestion}")
    return ALLOCATORS[table.name]


def convert_options(table: OptimizerPlan) -> Any:
    """Return the options of a plan's optimizer in their own type.

    Raises:
        ConfigError: There is no such optimizer, or it has no such option, value or solver.
    """
    allocator = find_allocator(table)
    if table.solver not in allocator.solvers:
        raise ConfigError(f"optimizer: {table.name} has no solver but {', '.join(allocator.solvers)}; leave solver out")
    try:
        return msgspec.convert(table.options, allocator.options)
    except msgspec.ValidationError as error:
        problem, _, key = escape_unprintable(error).partition(" - at `$.")
        where = f"options.{key.strip('`')} of {table.name}" if key else f"options of {table.name}"
        options = ", ".join(field.encode_name for field in msgspec.structs.fields(allocator.options))
        remedy = f"correct its spelling (known: {options})" if "unknown field" in problem else "correct the value"
        raise ConfigError(f"optimizer: {where}: {problem}; {remedy}") from error


def unused_values(table: OptimizerPlan, algorithm: str, uses: frozenset[str]) -> str:
    """Return what an optimizer decides that a method does not use, and the remedy; empty where it uses all.

    Args:
        algorithm: Of the method, by name.
        uses: What the method uses.
    """
    decides = find_allocator(table).decides
    unused = [name for name in decides if name not in uses | UPLINK_VALUES]
    if not unused:
        return ""
    others = " or ".join(name for name, allocator in ALLOCATORS.items() if uses.intersection(allocator.decides))
    is_paced = not UPLINK_VALUES.isdisjoint(decides)
    paced = "; uploads keep to their shares of the uplink all the same" if is_paced else ""
    return (
        f"optimizer {table.name!r} decides {', '.join(unused)}, which algorithm {algorithm!r} does not use: devices "
        f"train as without it{paced}; {f'choose optimizer {others}, or ' if others else ''}take [optimizer] out"
    )


def round_case(setting: RoundSetting, experience: Experience, reports: Mapping[str, Report]) -> Case:
    """Return the case of a round.

    Args:
        experience: What the run's journal teaches of the devices.
    """
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
    """Return one round's decision; nothing that a device says makes it fail."""
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
    """Return a decision as its record gives it back: of what is infinite, such as an upload without a link, nothing."""
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
