"""Figures of `bandwidth`: options, limits of a round, device estimates.

The time of a local iteration is measured before round 1, or is that of a task divided by its iterations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from edge_server.allocation.device_facts import (
    DeviceFacts,
    error_estimates,
    link_estimates,
    planned_step_s,
    planned_task_s,
)
from edge_server.allocation.figures import Estimate, choose_figures
from edge_server.allocation.inputs import RoundSetting, task_limits
from edge_server.allocation.optimizers.bandwidth_marks import Upload
from edge_server.allocation.options import MeasuringOptions
from edge_server.allocation.task_joules import joule_estimates, work_estimates
from edge_server.journal.decision import Figure
from shared.protocol.messages import AllocatedValues, Scalar

STEPS: Mapping[str, int] = {"personal_steps": 5, "global_steps": 5, "warmup_steps": 1, "updates_at_once": 0}
"""Of paper 004's method, where the plan's algorithm does not say: tau_v, tau_u, those of the warm-up; and whether steps
on both parts are the same ones."""

LEAST = 1e-9
"""Iterations of a task that has none."""


class BandwidthOptions(MeasuringOptions, frozen=True, kw_only=True):
    """Of `bandwidth`: pruning ratios and shares of the bandwidth of paper 004.

    Attributes:
        most_pruned: rho_max, which no device goes beyond where all can keep to it; 1 for no such bound.
        bits_per_weight: q, bits of a weight in an upload.
        equal: The paper's baseline, every device with an equal share: `latency`: with the ratio that meets the
            deadline; `ratio`: with the ratio that it would have with its best share.
        compute: How the seconds of an iteration depend on its weights: `paper`: in proportion to those that it trains;
            `dense`: not at all, as it is where masks save bytes and no work.
        marks: Whether what goes up beside the weights counts: which they are (a bit of each, or 32 of each that is
            held), and biases, which are never pruned.
        margin: Share of the deadline that is kept for what is not counted.
        fairness: How many equal parts of the uplink one device may have at most, 1 or more; 0, as in the paper: no
            limit, so that the floor of one slow device may take most of the uplink from the others.
        step_s: Time of a local iteration on a device that has measured nothing.
    """

    most_pruned: float = 0.95
    bits_per_weight: float = 32.0
    compute: Literal["paper", "dense"] = "paper"
    marks: bool = True
    margin: float = 0.0
    fairness: float = 0.0
    equal: Literal["", "latency", "ratio"] = ""
    step_s: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(bits_per_weight=self.bits_per_weight, step_s=self.step_s)
        self.require(below=1.0, most_pruned=self.most_pruned)
        if not 0 <= self.margin < 1:
            raise ValueError("options.margin must be in [0, 1)")
        if self.fairness != 0 and not 1 <= self.fairness < math.inf:
            raise ValueError("options.fairness must be 0 for no limit, or 1 equal part of the uplink or more")

    def upload(self, limits: Mapping[str, float]) -> Upload:
        """Return what goes up of the shared weights."""
        return Upload(limits["weights_global"], self.bits_per_weight, 8 * limits.get("dense_bytes", 0.0), self.marks)

    def most_share(self, count: int) -> float:
        """Return the largest share of the uplink that one of so many devices may have."""
        return min(1.0, self.fairness / max(1, count)) if self.fairness else 1.0

    def iterations(self, limits: Mapping[str, float], keep: float = 0.5) -> tuple[float, float, float]:
        """Return the iterations of the personal part, of the warm-up and of the global part, in whole networks.

        Who keeps all of the global part needs no warm-up, who keeps nothing of it takes no steps on it.
        """
        part = limits["weights_global"] / limits["weights"]
        personal, shared = limits["personal_steps"], limits["global_steps"] if keep > 0 else 0.0
        warm = limits["warmup_steps"] if 0 < keep < 1 else 0.0
        if self.compute == "dense":
            both = min(personal, shared) if limits.get("updates_at_once") else 0.0
            return personal + warm + shared - both, 0.0, 0.0
        return personal * (1 - part), warm * part, shared * part


def limits(options: BandwidthOptions, setting: RoundSetting) -> dict[str, float]:
    """Return seconds of a task, the sizes of the model's parts, and the iterations on each."""
    sizes = setting.sizes
    settings = {**setting.plan.algorithm.options, **sizes.facts}
    iterations = {name: _count(settings.get(name), usual) for name, usual in STEPS.items()}
    parts = {"weights_global": float(sizes.shared), "dense_bytes": float(sizes.dense_bytes)}
    if options.fairness:
        parts["most_share"] = options.most_share(len(set(setting.devices)))
    return task_limits(setting, options.deadline_s) | iterations | parts


def _count(value: Scalar | None, default: int) -> float:
    return float(value) if isinstance(value, int | float) and value >= 0 else float(default)


def figures(options: BandwidthOptions, device: DeviceFacts, limits: Mapping[str, float]) -> dict[str, Figure]:
    """Return a device's link and what a local iteration costs it.

    Args:
        device: What is known of it.
    """
    estimates = link_estimates(device, options)
    estimates["step_s"] = _step_estimate(device, options, limits)
    estimates |= joule_estimates(device, options) | work_estimates(device)
    if options.calibrated:
        estimates |= error_estimates(device, steps=True)
    return choose_figures(estimates, device.last, options)


def _step_estimate(device: DeviceFacts, options: BandwidthOptions, limits: Mapping[str, float]) -> Estimate:
    """Return what is known of one local iteration; a task's seconds are divided among its iterations."""
    resources, task = device.resources, device.task
    measured = resources.mu_s
    if measured is None and resources.cycles_per_weight and resources.f_hertz and resources.weights:
        measured = resources.cycles_per_weight * resources.weights / resources.f_hertz
    if measured is None and task and task.cost.compute_s:
        pruned = AllocatedValues.of(task.decision.values).prune if task.decision else None
        keep = 1 - (pruned or 0.0)
        before, warm, masked = options.iterations(limits, keep)
        measured = task.cost.compute_s / max(LEAST, before + warm + keep * masked)
    task_s, iterations = planned_task_s(device), max(LEAST, sum(options.iterations(limits)))
    profile = task_s / iterations if task_s else planned_step_s(device, limits["weights"])
    return Estimate(measured, profile=profile, default=options.step_s)
