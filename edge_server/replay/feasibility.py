"""What a replay will cost at the least, told before it begins: a budget that cannot be met is no use an hour later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from device_agent.trainer.interface import Job
from edge_server.plan.budget_plan import BudgetPlan
from edge_server.plan.devices import DevicePlan
from edge_server.plan.plan import Plan, share
from edge_server.replay.budget import Least, least_round, least_task, require_budgets
from edge_server.replay.devices.behaviour import Behaviour
from edge_server.replay.trainer import Scale
from shared.algorithms import ALGORITHMS
from shared.models.evaluate import skeleton
from shared.protocol.measurements import Cost
from shared.protocol.messages import Assignment, Task, Transfer
from shared.registry import build

NOTHING = Transfer(digest=b"", size=0, frame_bytes=0)


def require_possible(plan: Plan, fleet: Sequence[DevicePlan], behaviours: Sequence[Behaviour], scale: Scale) -> None:
    """Refuse a plan whose budgets its devices cannot keep to, however well everything goes.

    Raises:
        Infeasible: A budget is too small; the message says the smallest that can be met.
        ConfigError: The plan's data cannot be read, or nothing tells the joules of a budget.
    """
    algorithm = build(ALGORITHMS, plan.algorithm, "algorithm")
    is_known = algorithm.serve is None and algorithm.work is None  # else it depends on what each device is told
    if plan.budget != BudgetPlan() and is_known:
        require_budgets(plan, _rounds(plan, fleet, behaviours, scale))


def _rounds(plan: Plan, fleet: Sequence[DevicePlan], behaviours: Sequence[Behaviour], scale: Scale) -> Iterator[Least]:
    """Yield the least that each round can cost."""
    dense = sum(leaf.nbytes for leaf in skeleton(plan.model).state_dict().values())
    bytes_up = dense if plan.codec.name == "dense" else 0  # what another codec leaves of it is not known yet
    jobs = [_job(plan, fleet, index) for index in range(len(fleet))]
    works = [scale.of(job) for job in jobs]
    least = None
    for number in range(1, plan.rounds + 1):
        if least is None or any(behaviour.of_round for behaviour in behaviours):
            least = least_round(
                plan,
                (
                    least_task(behaviour, replace(work, round=number), dense, bytes_up)
                    for behaviour, work in zip(behaviours, works, strict=True)
                ),
            )
        yield least


def _job(plan: Plan, fleet: Sequence[DevicePlan], index: int) -> Job:
    """Return the job of a device's first round."""
    task = Task(
        run="",
        round=1,
        device=fleet[index].name,
        algorithm=plan.algorithm,
        model=plan.model,
        codec=plan.codec,
        assignment=Assignment(seed=plan.seed, hyper=plan.hyper),
        params=NOTHING,
        shared=False,
        evaluate=plan.evaluation.on_device,
        deadline_s=plan.round.deadline_s,
    )
    data = share(plan, fleet, index)
    return Job(task=task, params="", state="", draft="", data=data, frame_bytes=0, cost=Cost())
