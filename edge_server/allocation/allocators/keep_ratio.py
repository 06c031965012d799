"""Allocator `keep_ratio`: largest p_k whose task meets deadline, joules and memory.

A task counts as one step: earlier tasks give its seconds and joules on the whole model. Its joules are those of the
whole device while it downloads, computes and uploads, as a budget is charged. Training takes, of the
model's bytes, 1 + 0.79 p^2 + 0.84 p: weights, gradients of active parameters, activations of active neurons, in the
proportions of FedSPU's Fig. 5 (Z. Niu, H. Dong, A. K. Qin, AAAI 2025, https://arxiv.org/abs/2403.11464).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np

from edge_server.allocation.device_facts import DeviceFacts, error_estimates, link_estimates, planned_task_s
from edge_server.allocation.figures import Estimate, choose_figures
from edge_server.allocation.inputs import Case, RoundSetting, task_limits
from edge_server.allocation.optimizers.base import Bound, column
from edge_server.allocation.optimizers.keep_ratio import KeepAllocation, KeepRatio, solve
from edge_server.allocation.options import MeasuringOptions, parse_ratios
from edge_server.allocation.task_joules import add_joules, compute_w_estimate, joule_estimates, scale_figure
from edge_server.journal.decision import Decision, DeviceDecision, Figure, keep_ratio
from shared.protocol.measurements import Cost
from shared.protocol.messages import AllocatedValues

GRADIENTS, ACTIVATIONS = 0.30 / 0.38, 0.32 / 0.38
"""Bytes of gradients and activations, relative to those of the weights."""


class KeepOptions(MeasuringOptions, frozen=True, kw_only=True):
    """Largest p_k whose task meets the limits.

    Attributes:
        keep: Selectable ratios, comma-separated.
        joules: Energy limit of one device's task, with download, upload and idle power; absent: its part of the rest
            of `[budget] joules`, or no limit.
        curve: How the work of a step depends on the ratio: `frozen`: (2 + p^2) / 3, since only weight gradients are
            saved; `smaller`: p^2, for a network that is physically smaller.
        steps: Training steps of a task, to predict a task from a step timed before round 1; 0: unknown.
        task_s: Assumed time of a task with the whole model on a device without measurement.
    """

    keep: str = "0.2,0.4,0.6,0.8,1"
    joules: float | None = None
    curve: Literal["frozen", "smaller"] = "frozen"
    steps: int = 0
    task_s: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_ratios(self.keep)
        self.require(joules=self.joules, task_s=self.task_s)
        if self.steps < 0:
            raise ValueError("options.steps must be >= 0")

    def ratios(self) -> list[float]:
        """Return the distinct ratios, ascending."""
        return sorted(set(parse_ratios(self.keep)))

    def work(self, keep: float) -> float:
        """Return the work of a step relative to the whole model."""
        return (2 + keep**2) / 3 if self.curve == "frozen" else keep**2


def compute_limits(options: KeepOptions, setting: RoundSetting) -> dict[str, float]:
    """Return the seconds and joules of a task, and the model's size."""
    return task_limits(setting, options.deadline_s, options.joules)


def estimate_figures(options: KeepOptions, device: DeviceFacts, _limits: Mapping[str, float]) -> dict[str, Figure]:
    """Return a device's figures: link, and cost of a task with the whole model."""
    seconds, joules = (_whole_task(device, part, options) for part in ("compute_s", "compute_joules"))
    if (timed := device.timed) and options.steps:
        seconds = seconds or timed.seconds * options.steps
        joules = timed.joules * options.steps if joules is None and timed.joules is not None else joules
    estimates = link_estimates(device, options)
    estimates["task_s"] = Estimate(seconds, profile=planned_task_s(device), default=options.task_s)
    estimates["task_joules"] = Estimate(joules, profile=_planned_task_joules(device))
    estimates |= joule_estimates(device, options)
    if options.calibrated:
        estimates |= error_estimates(device, steps=False)
    return choose_figures(estimates, device.last, options)


def _planned_task_joules(device: DeviceFacts) -> float | None:
    watts, seconds = compute_w_estimate(device).profile, planned_task_s(device)
    return None if watts is None or seconds is None else watts * seconds


def _whole_task(device: DeviceFacts, part: str, options: KeepOptions) -> float | None:
    """Return the cost of a task with the whole model, extrapolated from the last task."""
    cost = getattr(device.task.cost, part) if device.task else None
    if cost is None or device.task is None:
        return None
    keep = AllocatedValues.of(device.task.decision.values).keep if device.task.decision else None
    return float(cost) / options.work(1.0 if keep is None else keep)


def decide(options: KeepOptions, _solver: object, case: Case) -> Decision:
    """Assign every device the largest ratio that fits."""
    if not case.names:
        return Decision()
    ratios = np.array([ratio for ratio, _ in case.ladder])
    sizes = np.array([size for _, size in case.ladder], np.float64)
    rate = np.array(case.column("up_bits_per_s", 0.0)) / np.array(case.column("upload_error", 1.0))
    error = np.array(case.column("joules_error", 1.0))
    problem = KeepRatio(
        step_s=np.array(case.column("task_s", math.inf)) * np.array(case.column("compute_error", 1.0)),
        steps=1.0,
        up_bits_per_s=rate,
        ratios=ratios,
        up_bytes=sizes,
        down_bytes=sizes,
        down_bits_per_s=np.array(case.column("down_bits_per_s", math.inf)),
        deadline_s=case.limits["deadline_s"],
        step_joules=np.array(case.column("task_joules", 0.0)) * error,
        tx_w=np.array(case.column("upload_w", 0.0)) * error,
        rx_w=np.array(case.column("download_w", 0.0)) * error,
        energy_joules=case.limits.get("joules", math.inf),
        memory_bytes=case.limits["model_bytes"] * (1 + GRADIENTS * ratios**2 + ACTIVATIONS * ratios),
        memory_limit_bytes=np.array(case.column("memory_bytes", math.inf)),
        curve=np.array([options.work(ratio) for ratio in ratios]),
        fixed_keep=np.array(case.column("keep", math.nan)),
    )
    allocation = solve(problem)
    return Decision(
        devices={
            device: _device_decision(options, case.figures_of(device), problem, allocation, place)
            for place, device in enumerate(case.names)
        },
        objective=float((1 - allocation.keep).sum()),
        feasible=allocation.feasible,
        enough=_sufficient_limits(case, allocation),
    )


def _device_decision(
    options: KeepOptions, figures: dict[str, Figure], problem: KeepRatio, allocation: KeepAllocation, place: int
) -> DeviceDecision:
    keep, size = float(allocation.keep[place]), float(allocation.up_bytes[place])
    bound, count = Bound(int(allocation.bound[place])), len(allocation.keep)
    up, down = (float(column(rate, count)[place]) for rate in (problem.up_bits_per_s, problem.down_bits_per_s))
    work = options.work(keep)
    upload_s = 8 * size / up if up > 0 else None
    download_s = 8 * size / down if 0 < down < math.inf else None
    predicted = Cost(
        compute_s=float(problem.step_s[place]) * work, upload_s=upload_s, download_s=download_s, bytes_up=int(size)
    )
    gains = {
        Bound.TIME: allocation.gain_per_s,
        Bound.ENERGY: allocation.gain_per_joule,
        Bound.MEMORY: allocation.gain_per_byte,
    }
    return DeviceDecision(
        values={"keep": keep},
        figures=figures,
        predicted=add_joules(
            predicted,
            figures,
            scale_figure(figures.get("task_joules"), work),
            scale_figure(figures.get("download_w"), download_s),
        ),
        binding=bound.name.lower(),
        multiplier=float(gains[bound][place]) if bound in gains else None,
    )


def _sufficient_limits(case: Case, allocation: KeepAllocation) -> dict[str, float]:
    """Return, for each exceeded limit, the largest cost over devices of the smallest ratio."""
    needed = {"deadline_s": float(allocation.enough_s.max()), "joules": float(allocation.enough_joules.max())}
    return {
        name: value
        for name, value in needed.items()
        if name in case.limits and case.limits[name] < value < math.inf and not allocation.feasible
    }


def keep_with_changed_figures(options: KeepOptions, _case: Case, changed: Case) -> dict[str, float]:
    """Return each device's ratio with its figures of `changed`; the decisions of devices are independent."""
    return {
        device: keep_ratio(decision.values) for device, decision in decide(options, "numpy", changed).devices.items()
    }
