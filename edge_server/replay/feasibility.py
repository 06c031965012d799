"""Feasibility check before a replay: reject budgets below a lower bound of its cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from device_agent.trainer.interface import Job
from edge_server.learner import blank_trained, plan_frozen
from edge_server.plan.budget import BudgetPlan
from edge_server.plan.data import device_data
from edge_server.plan.devices import DevicePlan
from edge_server.plan.plan import Plan
from edge_server.plan.sites import devices_by_site
from edge_server.replay.devices.behaviour import Behaviour, Work
from edge_server.replay.devices.flow import Flow
from edge_server.replay.workload import Workload
from edge_server.rounds import assign
from edge_server.rounds.neighbours import plan_of_site
from edge_server.rounds.quorum import updates_needed
from shared.algorithms import ALGORITHMS
from shared.errors import ConfigError, Infeasible
from shared.models.leaves import read_leaves
from shared.protocol.measurements import Cost
from shared.protocol.messages import Assignment, Task, Transfer
from shared.registry import build

TURNS = 6
"""Sequential messages of a task: task, request, frames; offer, request, frames."""

NOTHING = Transfer(digest=b"", size=0, frame_bytes=0)


class LowerBound(NamedTuple):
    """Lower bound on a cost.

    Attributes:
        joules: None if no part of it is known; unknown parts count as 0.
    """

    seconds: float
    joules: float | None


def bound_task(behaviour: Behaviour, work: Work, bytes_down: int, bytes_up: int) -> LowerBound:
    """Return a lower bound on a task's cost, at the highest link rates and the best clock."""
    effort = behaviour.least(work) if behaviour.least else behaviour.compute(work, 0.0)
    links = behaviour.of_round(work.round) if behaviour.of_round else (behaviour.up, behaviour.down)
    up_s, down_s = (_transfer_s(flow, size) for flow, size in zip(links, (bytes_up, bytes_down), strict=True))
    joules = [effort.joules, behaviour.radio("up", 0.0, up_s), behaviour.radio("down", 0.0, down_s)]
    known_joules = [value for value in joules if value is not None]
    seconds = down_s + effort.seconds + effort.lag_s + up_s + TURNS * behaviour.delay_s
    return LowerBound(seconds, math.fsum(known_joules) if known_joules else None)


def _transfer_s(flow: Flow | None, size: int) -> float:
    return 0.0 if flow is None or flow.most == math.inf else 8 * size / flow.most


def bound_round(plan: Plan, tasks: Iterable[LowerBound]) -> LowerBound:
    """Return a lower bound on the cost of a round whose cohort is drawn from these devices.

    A round ends with the update that completes the quorum, or at its deadline; devices that answer by then have spent
    their energy.
    """
    bounds = list(tasks)
    size, over = plan.cohort.size, plan.cohort.over_selection
    selected = len(
        assign.select_cohort([str(k) for k in range(len(bounds))], size=size, seed=0, number=0, over_selection=over)
    )
    needed = updates_needed(selected, size=size, quorum=plan.round.quorum)
    seconds = sorted(task.seconds for task in bounds)[:needed]
    joules = sorted(task.joules or 0.0 for task in bounds if task.seconds <= plan.round.deadline_s)[:needed]
    is_known = any(task.joules is not None for task in bounds)
    return LowerBound(min(plan.round.deadline_s, max(seconds, default=0.0)), math.fsum(joules) if is_known else None)


def require_budgets(plan: Plan, rounds: Iterable[LowerBound]) -> None:
    """Reject a plan whose budgets are below the lower bound.

    Args:
        rounds: Lower bound on each round.

    Raises:
        Infeasible: A budget is too small; the message names the smallest feasible one.
        ConfigError: The plan has an energy budget, but the power of no device is known.
    """
    bounds, budget = list(rounds), plan.budget
    seconds = math.fsum(bound.seconds for bound in bounds)
    known_joules = [bound.joules for bound in bounds if bound.joules is not None]
    if budget.joules is not None and not known_joules:
        raise ConfigError("budget.joules: the power of no device is known; add a table power to [[device]]")
    for name, unit, limit, least in (
        ("time_s", "s", budget.time_s, seconds),
        ("joules", "J", budget.joules, math.fsum(known_joules)),
    ):
        if limit is not None and limit < least:
            raise Infeasible(
                f"budget.{name}: {limit:g} {unit} cannot be met: {len(bounds)} rounds take at least "
                f"{_round_up(least):g} {unit}; give that, or fewer rounds"
            )


def _round_up(figure: float) -> float:
    """Round a figure up to four digits, so that the suggested budget is feasible."""
    if not figure:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(figure)) - 3)
    return float(math.ceil(figure / unit) * unit)


def require_possible(
    plan: Plan, fleet: Sequence[DevicePlan], behaviours: Sequence[Behaviour], workload: Workload
) -> None:
    """Reject a plan whose budgets its devices cannot meet even in the best case.

    Args:
        behaviours: One per device of `fleet`, in the same order.

    Raises:
        Infeasible: A budget is too small; the message names the smallest feasible one.
        ConfigError: The plan's data cannot be read, or it has an energy budget and no known power.
    """
    algorithm = build(ALGORITHMS, plan.algorithm, "algorithm")
    resources = algorithm.resources
    depends = algorithm.split or resources.step_share or resources.timed_step  # the cost depends on the assignment
    if plan.budget == BudgetPlan() or depends:
        return
    if not plan.sites:
        require_budgets(plan, _bound_rounds(plan, fleet, behaviours, workload, range(len(fleet))))
        return
    names = [device.name for device in fleet]
    for site, members in devices_by_site(plan.sites, names).items():
        bounds = _bound_rounds(plan, fleet, behaviours, workload, [names.index(name) for name in members])
        try:
            require_budgets(_plan_of_site(plan, site), bounds)
        except Infeasible as error:
            raise Infeasible(f"site {site}, whose joules are shared by number of devices: {error}") from error


def _plan_of_site(plan: Plan, site: str) -> Plan:
    """Return the plan with one site's budget: its share of the joules, or no energy budget if an optimizer moves it."""
    site_plan = plan_of_site(plan, site)
    budget = msgspec.structs.replace(site_plan.budget, joules=None) if plan.optimizer else site_plan.budget
    return msgspec.structs.replace(site_plan, budget=budget)


def _bound_rounds(
    plan: Plan, fleet: Sequence[DevicePlan], behaviours: Sequence[Behaviour], workload: Workload, members: Sequence[int]
) -> Iterator[LowerBound]:
    """Yield a lower bound on each round of the devices with these indices."""
    frozen = plan_frozen(plan)  # they are sent once, which is left out of the bound
    leaves = read_leaves(blank_trained(plan).layers)
    dense = sum(leaf.nbytes for name, leaf in leaves.items() if name not in frozen)
    bytes_up = dense if plan.codec.name == "dense" else 0  # the size under other codecs is not known yet
    devices = [(behaviours[index], workload.task_work(_first_job(plan, fleet, index))) for index in members]
    least = None
    for number in range(1, plan.rounds + 1):
        if least is None or any(behaviour.of_round for behaviour, _ in devices):
            tasks = (bound_task(behaves, replace(work, round=number), dense, bytes_up) for behaves, work in devices)
            least = bound_round(plan, tasks)
        yield least


def _first_job(plan: Plan, fleet: Sequence[DevicePlan], index: int) -> Job:
    """Return the job of a device's first round."""
    task = Task(
        run="",
        round=1,
        device=fleet[index].name,
        algorithm=plan.algorithm,
        model=plan.model.spec,
        codec=plan.codec,
        assignment=Assignment(seed=plan.seed, hyper=plan.hyper_of(1)),
        params=NOTHING,
        shared=False,
        evaluate=plan.evaluation.on_device,
        deadline_s=plan.round.deadline_s,
        objective=plan.task_objective,
        adaptation=plan.adaptation,
    )
    data = device_data(plan, fleet, index)
    return Job(task=task, params="", state="", draft="", data=data, frame_bytes=0, cost=Cost())
