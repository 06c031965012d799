"""Inputs of one round's allocation decision (`Case`).

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
"""Limit: joules of `round_joules` moved here from other rounds; negative if moved to them."""


@dataclass(frozen=True)
class Case:
    """Inputs of one round's decision, for all devices of its cohort.

    Attributes:
        devices: Names; duplicates count once.
        limits: Limits for all devices: seconds, joules, model sizes.
        figures: Figures by device and name.
        ladder: Selectable ratios, each with the bytes of its update.
        places: Order of first appearance in the run, from 0, by device.
    """

    devices: tuple[str, ...]
    limits: Mapping[str, float] = field(default_factory=dict)
    figures: Mapping[str, Mapping[str, Figure]] = field(default_factory=dict)
    ladder: tuple[tuple[float, int], ...] = ()
    places: Mapping[str, int] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Device names without duplicates."""
        return list(dict.fromkeys(self.devices))

    def column(self, name: str, otherwise: float) -> list[float]:
        """Return one figure for every device; `otherwise` where it is unknown."""
        figures = [self.figures.get(device, {}).get(name) for device in self.names]
        return [figure.value if figure else otherwise for figure in figures]

    def figures_of(self, device: str) -> dict[str, Figure]:
        """Return the figures of a device, as a copy for its record."""
        return dict(self.figures.get(device, {}))


def recorded_case(decision: Decision) -> Case:
    """Rebuild the case of a recorded decision."""
    return Case(
        devices=tuple(decision.devices),
        limits=decision.limits,
        figures={device: device_decision.figures for device, device_decision in decision.devices.items()},
        ladder=tuple(decision.ladder),
    )


@dataclass(frozen=True)
class Sizes:
    """Sizes of one model under one algorithm.

    Attributes:
        weights: N, weights of the whole network.
        shared: N_u, the weights that the server sends and devices may prune.
        bytes: Size of the whole model.
        download_bytes: What the algorithm sends to a device.
        upload_bytes: What a device sends that leaves nothing out.
        mixed_bytes: What a site sends to another one.
        dense_bytes: Upload bytes that pruning never saves: biases and the like.
        facts: `facts` of the algorithm's state, such as its steps.
    """

    weights: int
    shared: int
    bytes: int
    download_bytes: int
    upload_bytes: int
    mixed_bytes: int
    dense_bytes: int = 0
    facts: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundSetting:
    """Inputs of a round's limits.

    Attributes:
        spending: Spending of the run before this round.
        ladder: Selectable ratios, each with the bytes of its update.
        last_limits: Limits of the last decided round; empty before the first.
        fixed_values: Values that devices keep for the whole run, by device and name: see
            `shared.algorithms.base.Resources`.
    """

    plan: Plan
    number: int
    devices: tuple[str, ...]
    spending: RunSpending
    sizes: Sizes
    ladder: tuple[tuple[float, int], ...] = ()
    last_limits: Mapping[str, float] = field(default_factory=dict)
    fixed_values: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def task_limits(setting: RoundSetting, deadline_s: float | None, joules: float | None = None) -> dict[str, float]:
    """Return seconds and, where limited, joules of a task, and the model's size.

    The rest of a budget is divided evenly among the remaining rounds and the devices.

    Args:
        deadline_s: Seconds of a task; None for the plan's round deadline.
        joules: Joules of one device's task; None for its part of the plan's budget, if there is one.
    """
    plan, spending = setting.plan, setting.spending
    rounds_left = max(1, plan.rounds - setting.number + 1)
    seconds = deadline_s or plan.round.deadline_s
    if plan.budget.time_s is not None:
        seconds = min(seconds, max(0.0, plan.budget.time_s - spending.seconds) / rounds_left)
    limits = {"deadline_s": seconds}
    if plan.budget.time_s is not None:
        limits["spent_s"] = spending.seconds
    if plan.budget.joules is not None:
        limits["spent_joules"] = spending.joules or 0.0
    if joules is None and plan.budget.joules is not None:
        joules = max(0.0, plan.budget.joules - (spending.joules or 0.0)) / rounds_left / max(1, len(setting.devices))
    if joules is not None:
        limits["joules"] = joules
    return limits | model_limits(setting.sizes)


def model_limits(sizes: Sizes) -> dict[str, float]:
    """Return a model's sizes for a decision; that of a download only where it is not the model's."""
    limits = {"weights": float(sizes.weights), "model_bytes": float(sizes.bytes)}
    return limits if sizes.download_bytes == sizes.bytes else limits | {"download_bytes": float(sizes.download_bytes)}
