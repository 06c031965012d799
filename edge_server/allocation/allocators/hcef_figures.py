"""Figures of `hcef`: options, limits of a round, device estimates.

Seconds and joules are those that a budget counts: of the whole device, idle included, with downloads and the gradients
of estimates, which no decision changes. mu and alpha are those of the newest task, divided by its steps, or timed
before round 1; sigma^2 and G^2 come with the devices' last updates and serve the next round.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal

from edge_server.allocation.device_facts import (
    DeviceFacts,
    error_estimates,
    link_estimates,
    planned_step_s,
    planned_task_s,
)
from edge_server.allocation.figures import Estimate, choose_figures
from edge_server.allocation.inputs import SPREAD, RoundSetting, model_limits
from edge_server.allocation.optimizers.base import MOST
from edge_server.allocation.optimizers.hcef_budget import Place, remaining
from edge_server.allocation.options import MeasuringOptions
from edge_server.allocation.task_joules import joule_estimates, work_estimates
from edge_server.journal.decision import Figure
from edge_server.plan.plan import Plan
from edge_server.plan.simulated_devices import CyclesPower, GivenPower, RangeCompute, range_ends
from edge_server.plan.sites import round_position

MOMENTS = ("sigma2", "g2")
"""Names of the metrics with which devices report moments of their gradients."""
COUNTS = (("local_steps", 1), ("gradients", 0), ("estimate_every", 1))
"""Facts of the algorithm that are used, with their defaults for other algorithms."""
BUDGETS = (("deadline_s", "s"), ("round_joules", "joules"))
"""Limits that derive from a budget, with the unit suffix of their spending."""
FARTHEST = 10.0
"""Cap of a device's figure in sums over all devices, in medians."""
LEVELS = 64
"""Number of geometric steps between theta_min and 1 at which the bytes of an update are counted."""
DENSE = 31 / 32
"""Share from which sparse values of 32 bits with a bitmap take as many bytes as all values."""


class HcefOptions(MeasuringOptions, frozen=True, kw_only=True):
    """Share rho of the local steps that a device takes, and share theta of its change that it sends.

    Attributes:
        deadline_s: Time limit of a task; absent: that of `[round]`. The rest of `[budget] time_s`, divided among the
            remaining rounds, may be less.
        smoothing: Weight of the last figure against a new measurement; 0 uses each measurement unchanged.
        baseline: Method: `hcef` decides both; `cef` neither, all steps and the whole change; `cef_f` only steps;
            `cef_c` only the change; `mll_sgd` steps in proportion to a device's speed, ignoring budgets.
        joint: Whether both are decided jointly, by a solver with a certified gap, or alternately, as in the paper;
            absent: jointly, which takes at most tenths of a second. Alternation is mostly 2 to 3 % worse, up to 9 %.
        start: For alternation: share of the room beyond the floors that is spent on steps first; the result depends on
            it.
        whole_steps: Whether rho tau is rounded to a whole number, at least 1, so that a task takes exactly the steps
            decided for its deadline; otherwise it is rounded randomly, and the slowest of many devices takes longer.
        w_add: Weight of omitted steps in the objective; 3 as printed, 1 as in its proof.
        rho_min: Minimum share of the local steps.
        theta_min: Minimum share of the change.
        budget_smoothing: Weight of the last round's deadline and joules against what budgets leave now, so that one
            slow round does not burden only the next; 0, as in the paper: none.
        sigma2: Variance of minibatch gradients, if no device has reported it.
        g2: Squared norm of the gradient, if no device has reported it; only the ratio of both matters.
        step_s: Assumed time of a local step on a device without measurement.
    """

    baseline: Literal["hcef", "cef", "cef_f", "cef_c", "mll_sgd"] = "hcef"
    joint: bool | None = None
    start: float = 0.5
    whole_steps: bool = False
    w_add: float = 3.0
    rho_min: float = 0.05
    theta_min: float = 1e-3
    budget_smoothing: float = 0.0
    sigma2: float = 0.0
    g2: float = 1.0
    step_s: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(step_s=self.step_s, w_add=self.w_add, g2=self.g2)
        self.require(below=1.0, rho_min=self.rho_min, theta_min=self.theta_min)
        if not 0 <= self.start <= 1 or not 0 <= self.budget_smoothing < 1:
            raise ValueError("options.start must be in [0, 1], options.budget_smoothing in [0, 1)")
        if not 0 <= self.sigma2 < math.inf:
            raise ValueError("options.sigma2 must be >= 0 and finite")

    def levels(self) -> list[float]:
        """Return selectable theta from theta_min to 1, ascending."""
        between = {self.theta_min ** (1 - place / LEVELS) for place in range(1, LEVELS)}
        return sorted({self.theta_min, 1.0} | {level for level in between | {DENSE} if self.theta_min < level < 1})


def compute_limits(options: HcefOptions, setting: RoundSetting) -> dict[str, float]:
    """Return seconds of a task (15b), joules of the round (15c), tau, M and model sizes."""
    spending, place = setting.spending, round_place(setting.plan, setting.number)
    limits = {"deadline_s": _fixed_deadline(options, setting)}
    for name, unit in BUDGETS:
        budget_left = _budget_left(options, setting, name)
        if budget_left is None:
            continue
        limits[name] = min(limits.get(name, math.inf), budget_left)
        budget_spent = spending.seconds if unit == "s" else spending.joules or 0.0
        limits |= {f"spent_{unit}": budget_spent, f"before_{unit}": _spent_before(setting, unit)}
        limits["rounds_left"] = float((place.rounds - place.over) * place.edge_rounds - place.edge_over)
    if backhaul_s := backhaul_seconds(setting) if setting.plan.budget.time_s is not None else 0.0:
        limits["backhaul_s"] = backhaul_s
    tau, gradients, every = _counts(setting)
    is_due = every and not (setting.number - 1) % every
    limits |= {"local_steps": tau, "gradients": gradients if is_due else 0.0}
    if gradients and "rounds_left" in limits:
        limits["gradients_left"] = gradients * (_estimates(setting, setting.plan.rounds) - _estimates(setting))
    return limits | model_limits(setting.sizes)


def spread_estimates(
    options: HcefOptions,
    setting: RoundSetting,
    limits: Mapping[str, float],
    figures: Mapping[str, Mapping[str, Figure]],
) -> dict[str, float]:
    """Spread the cost of gradient estimates over all rounds that a budget has to last for.

    Rounds with estimates get their seconds and joules in addition, the others get less; with estimates in every round
    nothing changes. Joules are summed over devices, each at most `FARTHEST` medians; seconds are those of the median
    device.

    Args:
        limits: Result of `limits`.
        figures: Figures by device and name.
    """
    _, gradients, every = _counts(setting)
    if not gradients or every <= 1:
        return dict(limits)
    place, over = round_place(setting.plan, setting.number), setting.number - 1
    before = _estimates(setting, place.over * place.edge_rounds)
    usual = remaining(_estimates(setting, setting.plan.rounds), before, place, _estimates(setting, over) - before)
    more = float(not over % every) - usual
    steps_s, joules = (
        [figure.value for by_name in figures.values() if (figure := by_name.get(name)) and math.isfinite(figure.value)]
        for name in ("step_s", "step_joules")
    )
    costs = {
        "deadline_s": statistics.median(steps_s) if steps_s else 0.0,
        "round_joules": len(joules) * capped_mean(joules) if joules else 0.0,
    }
    spread = dict(limits)
    for name, cost in costs.items():
        if (budget_left := _budget_left(options, setting, name)) is not None:
            most = _fixed_deadline(options, setting) if name == "deadline_s" else math.inf
            spread[name] = min(most, max(0.0, budget_left + more * gradients * cost))
    if "round_joules" in spread:
        spread[SPREAD] = more * gradients * costs["round_joules"]
    return spread


def capped_mean(values: Sequence[float]) -> float:
    """Return the mean of reported values, each capped at `FARTHEST` medians of the positive ones.

    For honest devices this is the plain mean, as in the paper; the cap bounds the influence of a lying device.
    """
    above = [min(value, MOST) for value in values if value > 0]
    most = FARTHEST * statistics.median(above) if above else 0.0
    return math.fsum(min(value, most) for value in values) / len(values)


def _fixed_deadline(options: HcefOptions, setting: RoundSetting) -> float:
    return options.deadline_s or setting.plan.round.deadline_s


def _budget_left(options: HcefOptions, setting: RoundSetting, name: str) -> float | None:
    """Return this round's part of the budget behind the limit `name`; None without such a budget."""
    budget, spending = setting.plan.budget, setting.spending
    total, budget_spent, fixed = {
        "deadline_s": (budget.time_s, spending.seconds, backhaul_seconds(setting)),
        "round_joules": (budget.joules, spending.joules or 0.0, 0.0),
    }[name]
    if total is None:
        return None
    before = _spent_before(setting, dict(BUDGETS)[name])
    budget_left = max(
        0.0, remaining(total, before, round_place(setting.plan, setting.number), budget_spent - before, fixed)
    )
    if name in setting.last_limits:
        smoothed = (1 - options.budget_smoothing) * budget_left + options.budget_smoothing * setting.last_limits[name]
        budget_left = min(smoothed, max(0.0, total - budget_spent))
    return budget_left


def _spent_before(setting: RoundSetting, unit: str) -> float:
    """Return the seconds or joules spent before this global round."""
    budget_spent = setting.spending.seconds if unit == "s" else setting.spending.joules or 0.0
    is_within = round_place(setting.plan, setting.number).edge_over > 0
    return setting.last_limits.get(f"before_{unit}", budget_spent) if is_within else budget_spent


def _counts(setting: RoundSetting) -> tuple[float, float, float]:
    """Return tau, M, and the interval of gradient estimates in rounds."""
    tau, gradients, every = (_count(setting.sizes.facts.get(name), usual) for name, usual in COUNTS)
    return tau, gradients, every


def _estimates(setting: RoundSetting, rounds: int | None = None) -> int:
    """Count the rounds with gradient estimates among the first `rounds`; default: those before this round."""
    every = int(_counts(setting)[2])
    rounds = setting.number - 1 if rounds is None else rounds
    return -(-rounds // every) if every else 0


def backhaul_seconds(setting: RoundSetting) -> float:
    """Return the seconds of mixing at the end of this global round, max T_{i,i'}; 0 without peers.

    Measured as the last transfer of the slowest neighbour's model; before the first gossip, computed from the plan.
    """
    sites, measured_s = setting.plan.sites, setting.spending.backhaul_s
    if not sites or len(sites.names) == 1 or measured_s is not None:
        return measured_s or 0.0
    sent_s = 8 * setting.sizes.mixed_bytes / (sites.backhaul_mbit_s * 1e6) if sites.backhaul_mbit_s else 0.0
    return sent_s + sites.backhaul_delay_s


def round_place(plan: Plan, number: int) -> Place:
    """Return the position of a round in the run; without sites, each round is a global one."""
    edge_rounds = plan.sites.edge_rounds if plan.sites else 1
    over, edge_over = round_position(min(number, plan.rounds), edge_rounds)
    return Place(over, plan.rounds // edge_rounds, edge_over, edge_rounds)


def _count(value: object, default: int) -> float:
    return float(value) if isinstance(value, int) and value >= 0 else float(default)


def estimate_figures(options: HcefOptions, device: DeviceFacts, limits: Mapping[str, float]) -> dict[str, Figure]:
    """Return a device's figures: link, cost of a local step, gradient moments."""
    estimates = link_estimates(device, options)
    estimates |= {
        name: estimate for name, estimate in joule_estimates(device, options).items() if name != "joules_error"
    }
    estimates["download_joules"] = work_estimates(device)["download_joules"]
    estimates["step_s"] = _step_estimate(device, options, limits)
    estimates["step_joules"] = _step_joules(device)
    estimates |= {name: Estimate(device.metrics.get(name)) for name in MOMENTS}
    if options.calibrated:
        estimates |= error_estimates(device, steps=False)
    return choose_figures(estimates, device.last, options)


def _step_estimate(device: DeviceFacts, options: HcefOptions, limits: Mapping[str, float]) -> Estimate:
    measured = _cost_per_step(device, "compute_s", device.timed.seconds if device.timed else None)
    whole_s, steps = planned_task_s(device), limits["local_steps"] + limits["gradients"]
    profile = whole_s / steps if whole_s and steps else planned_step_s(device, limits["weights"])
    return Estimate(measured, profile=profile, default=options.step_s)


def _cost_per_step(device: DeviceFacts, part: str, timed: float | None) -> float | None:
    """Return a part of the newest task's cost per step, or `timed` before the first task.

    None if the task took no step.
    """
    task = device.task
    if task is None or task.steps is None:
        return timed
    cost = getattr(task.cost, part)
    return None if cost is None or not task.steps else float(cost) / task.steps


def _step_joules(device: DeviceFacts) -> Estimate:
    measured = _cost_per_step(device, "compute_joules", device.timed.joules if device.timed else None)
    return Estimate(measured, profile=_planned_step_joules(device))


def _planned_step_joules(device: DeviceFacts) -> float | None:
    """Return the joules of a local step from the plan's clock and power."""
    planned = device.planned
    if planned is None or not isinstance(planned.compute, RangeCompute) or not planned.compute.cycles_per_step:
        return None
    cycles, hertz = planned.compute.cycles_per_step, sum(range_ends(planned.compute.hertz)) / 2
    match planned.power:
        case CyclesPower() as power:
            return power.kappa * cycles * hertz**2 + power.idle_w * cycles / hertz
        case GivenPower() as power:
            return power.busy_w * cycles / hertz
        case _:
            return None
