"""Options, round limits and device estimates of the `bandwidth` allocator.

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
"""Defaults of the method of Liu et al.: tau_v, tau_u, warm-up steps; and whether one step updates both parts."""

LEAST = 1e-9
"""Iterations assumed for a task without any, to avoid division by zero."""


class BandwidthOptions(MeasuringOptions, frozen=True, kw_only=True):
    """Pruning ratios and bandwidth shares (Liu et al., arXiv 2309.01816).

    Attributes:
        most_pruned: rho_max, the largest pruning ratio if all devices can meet it; 1 for no bound.
        bits_per_weight: q, bits of a weight in an upload.
        equal: The paper's baseline with equal shares: `latency`: with the ratio that meets the deadline; `ratio`: with
            the ratio of the optimal share.
        compute: How the seconds of an iteration depend on its weights: `paper`: proportional to the trained weights;
            `dense`: not at all, if masks save bytes but no work.
        marks: Whether uploads also count the positions of kept weights (one bit per weight, or 32 per kept weight) and
            the biases, which are never pruned.
        margin: Share of the deadline reserved for what the model leaves out.
        fairness: Maximum share of one device, in equal parts of the uplink, 1 or more; 0, as in the paper: no limit,
            so that the floor of one slow device may take most of the uplink.
        step_s: Assumed time of a local iteration on a device without measurement.
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
        """Return the upload model of the shared weights."""
        return Upload(limits["weights_global"], self.bits_per_weight, 8 * limits.get("dense_bytes", 0.0), self.marks)

    def most_share(self, count: int) -> float:
        """Return the maximum share of the uplink per device, for a number of devices."""
        return min(1.0, self.fairness / max(1, count)) if self.fairness else 1.0

    def iterations(self, limits: Mapping[str, float], keep: float = 0.5) -> tuple[float, float, float]:
        """Return iterations of the personal part, the warm-up and the global part, in units of the whole network.

        A device that keeps the whole global part needs no warm-up; one that keeps nothing takes no steps on it.
        """
        part = limits["weights_global"] / limits["weights"]
        personal, shared = limits["personal_steps"], limits["global_steps"] if keep > 0 else 0.0
        warm = limits["warmup_steps"] if 0 < keep < 1 else 0.0
        if self.compute == "dense":
            both = min(personal, shared) if limits.get("updates_at_once") else 0.0
            return personal + warm + shared - both, 0.0, 0.0
        return personal * (1 - part), warm * part, shared * part


def compute_limits(options: BandwidthOptions, setting: RoundSetting) -> dict[str, float]:
    """Return the seconds of a task, the sizes of the model's parts, and the iterations on each."""
    sizes = setting.sizes
    settings = {**setting.plan.algorithm.options, **sizes.facts}
    iterations = {name: _count(settings.get(name), usual) for name, usual in STEPS.items()}
    parts = {"weights_global": float(sizes.shared), "dense_bytes": float(sizes.dense_bytes)}
    if options.fairness:
        parts["most_share"] = options.most_share(len(set(setting.devices)))
    return task_limits(setting, options.deadline_s) | iterations | parts


def _count(value: Scalar | None, default: int) -> float:
    return float(value) if isinstance(value, int | float) and value >= 0 else float(default)


def estimate_figures(options: BandwidthOptions, device: DeviceFacts, limits: Mapping[str, float]) -> dict[str, Figure]:
    """Return a device's figures: link, and cost of a local iteration."""
    estimates = link_estimates(device, options)
    estimates["step_s"] = _step_estimate(device, options, limits)
    estimates |= joule_estimates(device, options) | work_estimates(device)
    if options.calibrated:
        estimates |= error_estimates(device, steps=True)
    return choose_figures(estimates, device.last, options)


def _step_estimate(device: DeviceFacts, options: BandwidthOptions, limits: Mapping[str, float]) -> Estimate:
    """Estimate the seconds of one local iteration; a task's seconds are divided by its iterations."""
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
