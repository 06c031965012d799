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
from edge_server.allocation.inputs import SPREAD, RoundSetting
from edge_server.allocation.optimizers.base import MOST
from edge_server.allocation.optimizers.hcef_budget import Place, remaining
from edge_server.allocation.options import MeasuringOptions
from edge_server.allocation.task_joules import joule_estimates, work_estimates
from edge_server.journal.decision import Figure
from edge_server.plan.plan import Plan
from edge_server.plan.simulated_devices import CyclesPower, GivenPower, RangeCompute, range_ends
from edge_server.plan.sites import round_position

MOMENTS = ("sigma2", "g2")
"""What devices estimate of their gradients, by the names that they give it."""
COUNTS = (("local_steps", 1), ("gradients", 0), ("estimate_every", 1))
"""Of the method's facts, and what they are of any other."""
BUDGETS = (("deadline_s", "s"), ("round_joules", "joules"))
"""Limits that follow from a budget, with the unit in the names of what is spent of it."""
FARTHEST = 10.0
"""Times the median beyond which no device's figure counts in a sum over all."""
LEVELS = 64
"""Between theta_min and 1, at shares that grow by the same factor: for each, the bytes of an update are counted."""
DENSE = 31 / 32
"""Share from which on values of 32 bits and a bit for each place are no fewer bytes than all values."""


class HcefOptions(MeasuringOptions, frozen=True, kw_only=True):
    """Of `hcef`: rho, the share of its local steps that a device takes, and theta, of its change that it sends.

    Attributes:
        deadline_s: Time within which a task is to be done; absent: that of `[round]`. The rest of `[budget] time_s`,
            shared among the rounds that are left, may be less.
        smoothing: Weight of the last figure beside a new measurement; 0 takes each as it is.
        baseline: What is compared: `hcef` decides both; `cef` neither, all steps and the whole change; `cef_f` steps
            alone; `cef_c` the change alone; `mll_sgd` steps in proportion to a device's speed, whatever the budgets.
        joint: Whether both are decided at once, by a solver with a certified gap, or in turn, as the paper does;
            absent: at once, which takes tenths of a second at the most. In turn is 2 to 3 % worse mostly, up to 9 %.
        start: Of what is decided in turn: share of the room beyond the floors that is spent on steps at first; where it
            ends depends on it.
        whole_steps: Whether rho tau is made whole, at least one, so that a task takes as many steps as were decided for
            its deadline; else chance makes it whole, and the slowest of many devices takes longer.
        w_add: Weight of the steps that are left out in the objective; 3 as printed, 1 as its proof has it.
        rho_min: Least share of the local steps.
        theta_min: Least share of the change.
        budget_smoothing: Weight of the last round's deadline and joules beside what budgets leave now, so that one slow
            round does not press on the next alone; 0, as in the paper: none.
        sigma2: Variance of minibatch gradients, where no device has told it.
        g2: Squared norm of the gradient, likewise; of both only their ratio counts.
        step_s: Time of a local step on a device that has measured nothing.
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
        """Return shares of a change from the least to all of it, in order."""
        between = {self.theta_min ** (1 - place / LEVELS) for place in range(1, LEVELS)}
        return sorted({self.theta_min, 1.0} | {level for level in between | {DENSE} if self.theta_min < level < 1})


def limits(options: HcefOptions, setting: RoundSetting) -> dict[str, float]:
    """Return the seconds of a task and the joules of the round, (15b) and (15c), tau, M, and the sizes of the model."""
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
    return limits | {"weights": float(setting.sizes.weights), "model_bytes": float(setting.sizes.bytes)}


def spread_estimates(
    options: HcefOptions,
    setting: RoundSetting,
    limits: Mapping[str, float],
    figures: Mapping[str, Mapping[str, Figure]],
) -> dict[str, float]:
    """Return the limits with the cost of gradient estimates spread over all rounds that a budget has to last for.

    A round with estimates has their seconds and joules more, the others have them less; with estimates in every round
    nothing changes. Joules are those of all devices, of each no more than `FARTHEST` medians; seconds are those of the
    median device.

    Args:
        limits: As `limits` returns them.
        figures: Of each device, by name.
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
    """Return the mean of what devices tell, of each no more than so many times the median of those above zero.

    Of honest devices it is the plain mean, as in the paper; one that lies moves it by no more than a share of that.
    """
    above = [min(value, MOST) for value in values if value > 0]
    most = FARTHEST * statistics.median(above) if above else 0.0
    return math.fsum(min(value, most) for value in values) / len(values)


def _fixed_deadline(options: HcefOptions, setting: RoundSetting) -> float:
    return options.deadline_s or setting.plan.round.deadline_s


def _budget_left(options: HcefOptions, setting: RoundSetting, name: str) -> float | None:
    """Return what a budget leaves to this round of the limit `name`; None where there is no such budget."""
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
    """Return what was spent before this global round."""
    budget_spent = setting.spending.seconds if unit == "s" else setting.spending.joules or 0.0
    is_within = round_place(setting.plan, setting.number).edge_over > 0
    return setting.last_limits.get(f"before_{unit}", budget_spent) if is_within else budget_spent


def _counts(setting: RoundSetting) -> tuple[float, float, float]:
    """Return tau, M, and from how many rounds to the next one gradients are estimated."""
    tau, gradients, every = (_count(setting.sizes.facts.get(name), usual) for name, usual in COUNTS)
    return tau, gradients, every


def _estimates(setting: RoundSetting, rounds: int | None = None) -> int:
    """Return in how many of the first rounds gradients are estimated; without `rounds`, of those before this one."""
    every = int(_counts(setting)[2])
    rounds = setting.number - 1 if rounds is None else rounds
    return -(-rounds // every) if every else 0


def backhaul_seconds(setting: RoundSetting) -> float:
    """Return what mixing at the end of this global round will take of the run's time, max T_{i,i'}; 0 without peers.

    As the slowest neighbour's model took last; before the first gossip, as the plan has the links between sites.
    """
    sites, measured_s = setting.plan.sites, setting.spending.backhaul_s
    if not sites or len(sites.names) == 1 or measured_s is not None:
        return measured_s or 0.0
    sent_s = 8 * setting.sizes.bytes / (sites.backhaul_mbit_s * 1e6) if sites.backhaul_mbit_s else 0.0
    return sent_s + sites.backhaul_delay_s


def round_place(plan: Plan, number: int) -> Place:
    """Return where a run stands when a round begins; where sites do not mix, each round is a global one."""
    edge_rounds = plan.sites.edge_rounds if plan.sites else 1
    over, edge_over = round_position(min(number, plan.rounds), edge_rounds)
    return Place(over, plan.rounds // edge_rounds, edge_over, edge_rounds)


def _count(value: object, default: int) -> float:
    return float(value) if isinstance(value, int) and value >= 0 else float(default)


def figures(options: HcefOptions, device: DeviceFacts, limits: Mapping[str, float]) -> dict[str, Figure]:
    """Return a device's link, what a local step costs it, and what it told of its gradients.

    Args:
        device: What is known of it.
    """
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
    """Return seconds of a local step, as measured or as the plan has them."""
    measured = _cost_per_step(device, "compute_s", device.timed.seconds if device.timed else None)
    whole_s, steps = planned_task_s(device), limits["local_steps"] + limits["gradients"]
    profile = whole_s / steps if whole_s and steps else planned_step_s(device, limits["weights"])
    return Estimate(measured, profile=profile, default=options.step_s)


def _cost_per_step(device: DeviceFacts, part: str, timed: float | None) -> float | None:
    """Return a part of the newest task's cost by its steps, and what was timed where there was no such task yet.

    A task in which no step was taken tells nothing.
    """
    task = device.task
    if task is None or task.steps is None:
        return timed
    cost = getattr(task.cost, part)
    return None if cost is None or not task.steps else float(cost) / task.steps


def _step_joules(device: DeviceFacts) -> Estimate:
    """Return joules of a local step, of the whole device."""
    measured = _cost_per_step(device, "compute_joules", device.timed.joules if device.timed else None)
    return Estimate(measured, profile=_planned_step_joules(device))


def _planned_step_joules(device: DeviceFacts) -> float | None:
    """Return joules of a local step by the clock and the power that the plan gives the device."""
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
