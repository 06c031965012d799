"""Case: all inputs of one round's decision.

The same case always gives the same decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from edge_server.journal.budget import RunSpending
from edge_server.journal.decision import Decision, Figure
from edge_server.plan.plan import Plan
from shared.protocol.messages import Scalar

SPREAD = "spread_joules"
"""Limit: joules of `round_joules` that come from other rounds' parts of the budget, below zero where they go there."""


@dataclass(frozen=True)
class Case:
    """One round, for all devices of its cohort.

    Attributes:
        devices: By name; one that is named twice is one.
        limits: What holds for all of them: seconds, joules, sizes of the model.
        figures: Of each device, by name.
        ladder: Ratios to choose from, each with the bytes of an update.
        places: Of each device in the order in which the run has met them.
    """

    devices: tuple[str, ...]
    limits: Mapping[str, float] = field(default_factory=dict)
    figures: Mapping[str, Mapping[str, Figure]] = field(default_factory=dict)
    ladder: tuple[tuple[float, int], ...] = ()
    places: Mapping[str, int] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Return the devices, each once."""
        return list(dict.fromkeys(self.devices))

    def column(self, name: str, otherwise: float) -> list[float]:
        """Return one figure of every device; `otherwise` where it is not known."""
        found = [self.figures.get(device, {}).get(name) for device in self.names]
        return [figure.value if figure else otherwise for figure in found]

    def known(self, device: str) -> dict[str, Figure]:
        """Return what the record keeps of a device."""
        return dict(self.figures.get(device, {}))


def recorded_case(decision: Decision) -> Case:
    """Return the case that a recorded decision was made from."""
    return Case(
        devices=tuple(decision.devices),
        limits=decision.limits,
        figures={device: given.figures for device, given in decision.devices.items()},
        ladder=tuple(decision.ladder),
    )


@dataclass(frozen=True)
class Sizes:
    """Of one model under one algorithm.

    Attributes:
        weights: Of the whole network; N.
        shared: Those of them that go down and may be pruned; N_u.
        bytes: Of the whole model.
        dense_bytes: Of what goes up whatever is pruned: biases and the like.
        facts: What the algorithm says of itself beside its state, such as its steps.
    """

    weights: int
    shared: int
    bytes: int
    dense_bytes: int = 0
    facts: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundSetting:
    """What the limits of a round follow from.

    Attributes:
        spending: What the run has spent before it.
        ladder: Ratios to choose from, each with the bytes of an update.
        last_limits: Of the round that was decided last; none before the first.
        settled: What devices were given once and for all, by device and name: see `shared.algorithms.base.Resources`.
    """

    plan: Plan
    number: int
    devices: tuple[str, ...]
    spending: RunSpending
    sizes: Sizes
    ladder: tuple[tuple[float, int], ...] = ()
    last_limits: Mapping[str, float] = field(default_factory=dict)
    settled: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def task_limits(setting: RoundSetting, deadline_s: float | None, joules: float | None = None) -> dict[str, float]:
    """Return seconds of a task, joules of one device's task where there is a limit, and the model's size.

    What is spent of a budget is gone; what is left is shared among the rounds that are left and the devices.

    Args:
        deadline_s: Seconds of a task; None for the deadline of the plan's rounds.
        joules: Of one device's task; None for its part of the plan's budget, if there is one.
    """
    plan, spending = setting.plan, setting.spending
    left = max(1, plan.rounds - setting.number + 1)
    seconds = deadline_s or plan.round.deadline_s
    if plan.budget.time_s is not None:
        seconds = min(seconds, max(0.0, plan.budget.time_s - spending.seconds) / left)
    limits = {"deadline_s": seconds}
    if plan.budget.time_s is not None:
        limits["spent_s"] = spending.seconds
    if plan.budget.joules is not None:
        limits["spent_joules"] = spending.joules or 0.0
    if joules is None and plan.budget.joules is not None:
        joules = max(0.0, plan.budget.joules - (spending.joules or 0.0)) / left / max(1, len(setting.devices))
    if joules is not None:
        limits["joules"] = joules
    return limits | {"weights": float(setting.sizes.weights), "model_bytes": float(setting.sizes.bytes)}
