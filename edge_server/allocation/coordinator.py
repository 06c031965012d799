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
from edge_server.plan.devices import expanded
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

OF_THE_UPLINK = frozenset({"share", "up_bits_per_s"})
"""Values that a device keeps to whatever it trains."""


def allocator_of(table: OptimizerPlan) -> Allocator[Any]:
    """Return who decides.

    Raises:
        ConfigError: There is nobody of that name.
    """
    if table.name not in ALLOCATORS:
        known, meant = ", ".join(sorted(ALLOCATORS)), guess(table.name, ALLOCATORS)
        raise ConfigError(f"optimizer.name: unknown optimizer {table.name!r}; known: {known}{meant}")
    return ALLOCATORS[table.name]


def options_of(table: OptimizerPlan) -> Any:
    """Return the options of a plan's optimizer in their own type.

    Raises:
        ConfigError: There is no such optimizer, or it has no such option, value or solver.
    """
    chosen = allocator_of(table)
    if table.solver not in chosen.solvers:
        raise ConfigError(f"optimizer: {table.name} has no solver but {', '.join(chosen.solvers)}; leave solver out")
    try:
        return msgspec.convert(table.options, chosen.options)
    except msgspec.ValidationError as error:
        problem, _, key = escape_unprintable(error).partition(" - at `$.")
        where = f"options.{key.strip('`')} of {table.name}" if key else f"options of {table.name}"
        known = ", ".join(field.encode_name for field in msgspec.structs.fields(chosen.options))
        remedy = f"correct its spelling (known: {known})" if "unknown field" in problem else "correct the value"
        raise ConfigError(f"optimizer: {where}: {problem}; {remedy}") from error


def unused_values(table: OptimizerPlan, algorithm: str, uses: frozenset[str]) -> str:
    """Return what an optimizer decides that a method does not use, and the remedy; empty where it uses all.

    Args:
        algorithm: Of the method, by name.
        uses: What the method uses.
    """
    decides = allocator_of(table).decides
    unused = [name for name in decides if name not in uses | OF_THE_UPLINK]
    if not unused:
        return ""
    others = " or ".join(name for name, one in ALLOCATORS.items() if uses.intersection(one.decides))
    is_paced = not OF_THE_UPLINK.isdisjoint(decides)
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
    chosen, options = allocator_of(table), options_of(table)
    planned = {one.name: one for one in expanded(setting.plan.device)}
    met = list(dict.fromkeys([*planned, *experience.order, *setting.devices]))
    limits = chosen.limits(options, setting)
    figures = {
        device: chosen.figures(options, device_facts(device, reports, experience, planned.get(device)), limits)
        for device in setting.devices
    }
    limits = chosen.spread(options, setting, limits, figures)
    for device, settled in setting.settled.items():
        figures[device] = {**figures[device], **{name: Figure(value, "measured") for name, value in settled.items()}}
    return Case(setting.devices, limits, figures, setting.ladder, {device: place for place, device in enumerate(met)})


def decide(table: OptimizerPlan, case: Case) -> Decision:
    """Return one round's decision; nothing that a device says makes it fail."""
    decision = allocator_of(table).decide(options_of(table), table.solver, case)
    decision = msgspec.structs.replace(
        decision,
        optimizer=table.name,
        limits=dict(case.limits),
        ladder=list(case.ladder),
        enough={name: value for name, value in decision.enough.items() if math.isfinite(value)},
    )
    return _as_recorded(decision)


def _as_recorded(decision: Decision) -> Decision:
    """Return a decision as its record gives it back: of what is infinite, such as an upload without a link, nothing."""
    if b"null" not in msgspec.json.encode(decision):
        return decision
    devices = {
        device: msgspec.structs.replace(
            given, figures={name: one for name, one in given.figures.items() if math.isfinite(one.value)}
        )
        for device, given in decision.devices.items()
    }
    return msgspec.json.decode(msgspec.json.encode(msgspec.structs.replace(decision, devices=devices)), type=Decision)
