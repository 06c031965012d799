"""Explanation of a round's decision: figures, binding limits, margins, costs.

A margin is what one more second, joule, megahertz or Mbit/s would buy. For the limits that all devices share, the
recorded case is decided again with slightly more; for figures of single devices, `WhatIf.keep_ratios` changes all of
them at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from edge_server.allocation.coordinator import convert_options, decide, find_allocator
from edge_server.allocation.inputs import Case, recorded_case
from edge_server.journal.costs import costs_by_round
from edge_server.journal.decision import Decision, Figure, keep_ratio
from edge_server.journal.records import AnyRecord, RoundClosed, RoundOpened, RunOpened, first, valid_records
from edge_server.journal.runs import make_round_namer
from edge_server.plan.optimizer import OptimizerPlan
from shared.errors import ConfigError
from shared.protocol.measurements import Cost
from shared.protocol.messages import Value

MEGA, LITTLE = 1e6, 0.01


class DeviceExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """Explanation of one device in one round.

    Attributes:
        values: Assigned values.
        figures: Figures that the decision used.
        binding: The limit that prevented more.
        buys: Increase in keep ratio per additional `second` of the deadline, `joule` of the task, `megahertz` of the
            clock, `megabit_per_s` of the link; only those that apply. In large fleets the last two are approximate:
            see `edge_server.allocation.allocators.bandwidth_what_if`.
        measured: None while unknown.
    """

    device: str
    values: dict[str, Value]
    figures: dict[str, Figure]
    binding: str
    multiplier: float | None
    buys: dict[str, float]
    predicted: Cost
    measured: Cost | None


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Explanation of one round.

    Attributes:
        named: Display name of the round: `global.edge` in a plan with sites.
        feasible: Whether all devices could meet the limits.
        enough: If not, the smallest limits that they could meet.
        multiplier: Value of one unit of the shared resource.
        seconds: Duration of the round; None while it is open.
        devices: Sorted by name.
    """

    round: int
    named: str
    optimizer: str
    limits: dict[str, float]
    feasible: bool
    enough: dict[str, float]
    objective: float | None
    multiplier: float | None
    seconds: float | None
    devices: list[DeviceExplanation]


def explain(records: Sequence[AnyRecord], number: int, only: str = "") -> Explanation:
    """Explain a round.

    Args:
        only: Name of the device to explain; empty for all.

    Raises:
        ConfigError: The round or device does not exist, or the round has no decision.
    """
    run_opening = first(records, RunOpened)
    table = run_opening.plan.optimizer if run_opening else None
    openings = [record for record in valid_records(records, RoundOpened) if record.round == number]
    named = make_round_namer(records)(number)
    if not openings:
        raise ConfigError(f"round {named} has not started; `edge-server show` lists the rounds of the run")
    decision = openings[-1].decision
    if table is None or decision is None:
        why = "a record of a trace has no decisions" if table else "the plan has no table [optimizer]"
        raise ConfigError(f"round {named} cannot be explained: {why}")
    if only and only not in decision.devices:
        raise ConfigError(f"device {only!r} is not in round {named}; its devices are {', '.join(decision.devices)}")
    closings = [record for record in valid_records(records, RoundClosed) if record.round == number]
    costs = costs_by_round(records).get(number, {})
    names = [only] if only else sorted(decision.devices)
    margins = find_margins(table, decision, names)
    return Explanation(
        round=number,
        named=named,
        optimizer=decision.optimizer,
        limits=decision.limits,
        feasible=decision.feasible,
        enough=decision.enough,
        objective=decision.objective,
        multiplier=decision.multiplier,
        seconds=closings[-1].seconds if closings else None,
        devices=[_explain_device(name, decision, margins.get(name, {}), costs.get(name)) for name in names],
    )


def _explain_device(name: str, decision: Decision, buys: dict[str, float], measured: Cost | None) -> DeviceExplanation:
    device_decision = decision.devices[name]
    return DeviceExplanation(
        device=name,
        values=device_decision.values,
        figures=device_decision.figures,
        binding=device_decision.binding,
        multiplier=device_decision.multiplier,
        buys=buys,
        predicted=device_decision.predicted,
        measured=measured,
    )


def find_margins(table: OptimizerPlan, decision: Decision, names: list[str]) -> dict[str, dict[str, float]]:
    """Return the margins (`DeviceExplanation.buys`) of the named devices.

    The increase is one unit if there is a ladder of ratios, otherwise a small share; margins are per unit.
    """
    what_if, options = find_allocator(table).what_if, convert_options(table)
    if what_if is None:
        return {}
    table, case = msgspec.structs.replace(table, solver="numpy"), recorded_case(decision)
    margins: dict[str, dict[str, float]] = {name: {} for name in names}
    for limit, what in (("deadline_s", "second"), ("joules", "joule")):
        if limit in case.limits:
            amount = 1.0 if case.ladder else LITTLE * (case.limits[limit] or 1.0)
            more = {**case.limits, limit: case.limits[limit] + amount}
            again = decide(table, dataclasses.replace(case, limits=more))
            for name in names:
                now = keep_ratio(again.devices[name].values)
                margins[name][what] = (now - keep_ratio(decision.devices[name].values)) / amount
    before = what_if.keep_ratios(options, case, case)
    for what, changes in _small_increases(case, what_if.clock).items():
        figures = {name: {**case.figures[name], change.figure: change.value} for name, change in changes.items()}
        after = what_if.keep_ratios(options, case, dataclasses.replace(case, figures={**case.figures, **figures}))
        for name in changes.keys() & margins.keys():
            margins[name][what] = (after[name] - before[name]) / changes[name].amount
    return margins


class _Change(NamedTuple):
    """Increase of one device's clock or link rate: amount in MHz or Mbit/s, and the figure that it changes."""

    amount: float
    figure: str
    value: Figure


def _small_increases(case: Case, seconds: str) -> dict[str, dict[str, _Change]]:
    """Return a small increase of each device's clock and link rate, by unit and device."""
    increases: dict[str, dict[str, _Change]] = {"megahertz": {}, "megabit_per_s": {}}
    for name, figures in case.figures.items():
        clock, took, rate = figures.get("f_hertz"), figures.get(seconds), figures.get("up_bits_per_s")
        if clock and took:
            more = 1.0 if case.ladder else LITTLE * clock.value / MEGA
            faster = Figure(took.value * clock.value / (clock.value + more * MEGA), "measured")
            increases["megahertz"][name] = _Change(more, seconds, faster)
        if rate:
            more = 1.0 if case.ladder else LITTLE * rate.value / MEGA
            faster = Figure(rate.value + more * MEGA, "measured")
            increases["megabit_per_s"][name] = _Change(more, "up_bits_per_s", faster)
    return increases
