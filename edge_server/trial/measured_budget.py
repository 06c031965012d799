"""A budget that is a share of what a plan's baseline was measured to take: a run of it by `cef` comes first.

HCEF's budgets are six tenths of what the same rounds take where every device takes all its steps and sends its whole
change; no figure of a link or a board has to be known for that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from edge_server.journal.budget import Ledger
from edge_server.journal.records import AnyRecord, RunClosed
from edge_server.plan.plan import Plan
from edge_server.plan.sections import BudgetPlan
from shared.errors import ConfigError, TaskFailed

BASELINE = "cef"


class Taken(NamedTuple):
    """What a run took: seconds of its slowest site; joules of all sites, None where no device told any."""

    seconds: float
    joules: float | None


def baseline_of(plan: Plan) -> Plan:
    """Return the plan as its baseline: everything of every device in every round, without a budget.

    Raises:
        ConfigError: Its optimizer is not `hcef`, which alone has such a baseline.
    """
    if plan.optimizer is None or plan.optimizer.name != "hcef":
        raise ConfigError(
            f"plan {plan.name!r}: --{BASELINE}-share is for plans whose [optimizer] is hcef, which has that baseline"
        )
    replace = msgspec.structs.replace
    optimizer = replace(plan.optimizer, options={**plan.optimizer.options, "baseline": BASELINE})
    options = {name: one for name, one in plan.algorithm.options.items() if name != "gradients"}  # decide nothing here
    algorithm = replace(plan.algorithm, options={**options, "gradients": 0})
    return replace(plan, name=f"{plan.name}-{BASELINE}", optimizer=optimizer, algorithm=algorithm, budget=BudgetPlan())


def taken(runs: Iterable[Sequence[AnyRecord]]) -> Taken:
    """Return what the runs of a plan's sites took together, by their journals.

    Raises:
        TaskFailed: One of them did not end.
    """
    spent = []
    for records in runs:
        if not any(isinstance(one, RunClosed) and one.outcome == "finished" for one in records):
            raise TaskFailed(f"the run by {BASELINE} is not whole, and says nothing of what all rounds take")
        ledger = Ledger()
        ledger.take(records)
        spent.append(ledger.spending())
    told = [one.joules for one in spent if one.joules is not None]
    return Taken(max(one.seconds for one in spent), math.fsum(told) if len(told) == len(spent) else None)


def with_budget(plan: Plan, share: float, took: Taken) -> Plan:
    """Return the plan with a share of what was taken as its budget.

    Args:
        share: Above 0.
    """
    joules = None if took.joules is None else share * took.joules
    return msgspec.structs.replace(plan, budget=BudgetPlan(time_s=share * took.seconds, joules=joules))


def describe(share: float, took: Taken) -> str:
    """Return in a line what was taken and what the budgets are."""
    if took.joules is None:
        return f"{BASELINE} took {took.seconds:.1f} s, and no device told its joules: time_s is {share:g} of that"
    return (
        f"{BASELINE} took {took.seconds:.1f} s and {took.joules:.1f} J: "
        f"time_s = {share * took.seconds:.1f} and joules = {share * took.joules:.1f} are {share:g} of that"
    )


def require_share(share: float) -> None:
    """Refuse a share that is none.

    Raises:
        ConfigError: It is.
    """
    if not 0 < share < math.inf:
        raise ConfigError(f"--{BASELINE}-share: {share:g}; give a share above 0, such as 0.6")
