"""Budgets from a measured baseline run (`--cef-share`).

HCEF's budgets are six tenths of the cost of the same rounds when every device takes all its steps and sends its whole
change. Running that baseline first needs no model of links or boards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from edge_server.journal.budget import Ledger
from edge_server.journal.records import AnyRecord, RunClosed
from edge_server.plan.budget import BudgetPlan
from edge_server.plan.plan import Plan
from shared.errors import ConfigError, TaskFailed

BASELINE = "cef"


class BaselineCost(NamedTuple):
    """Cost of a baseline run: seconds of its slowest site; joules of all sites, None unless all report them."""

    seconds: float
    joules: float | None


def make_baseline_plan(plan: Plan) -> Plan:
    """Return the plan's baseline: all steps and full updates of every device in every round, without a budget.

    Raises:
        ConfigError: Its optimizer is not `hcef`, the only one with such a baseline.
    """
    if plan.optimizer is None or plan.optimizer.name != "hcef":
        raise ConfigError(f"plan {plan.name!r}: --{BASELINE}-share needs a plan with optimizer hcef")
    replace = msgspec.structs.replace
    optimizer = replace(plan.optimizer, options={**plan.optimizer.options, "baseline": BASELINE})
    options = {
        name: value for name, value in plan.algorithm.options.items() if name != "gradients"
    }  # a baseline decides nothing
    algorithm = replace(plan.algorithm, options={**options, "gradients": 0})
    return replace(plan, name=f"{plan.name}-{BASELINE}", optimizer=optimizer, algorithm=algorithm, budget=BudgetPlan())


def read_baseline_cost(runs: Iterable[Sequence[AnyRecord]]) -> BaselineCost:
    """Return the cost of the runs of a plan's sites, from their journals.

    Raises:
        TaskFailed: One of them did not finish.
    """
    spendings = []
    for records in runs:
        if not any(isinstance(record, RunClosed) and record.outcome == "finished" for record in records):
            raise TaskFailed(f"the {BASELINE} run did not finish, so the cost of all rounds is unknown; see its log")
        ledger = Ledger()
        ledger.take(records)
        spendings.append(ledger.spending())
    joules = [spending.joules for spending in spendings if spending.joules is not None]
    return BaselineCost(
        max(spending.seconds for spending in spendings), math.fsum(joules) if len(joules) == len(spendings) else None
    )


def set_budget(plan: Plan, share: float, took: BaselineCost) -> Plan:
    """Return the plan with a share of the measured cost as its budget.

    Args:
        share: Fraction of the cost, above 0.
    """
    joules = None if took.joules is None else share * took.joules
    return msgspec.structs.replace(plan, budget=BudgetPlan(time_s=share * took.seconds, joules=joules))


def format_budget(share: float, took: BaselineCost) -> str:
    """Return a line with the measured cost and the resulting budgets."""
    if took.joules is None:
        return f"{BASELINE} took {took.seconds:.1f} s, no device reported joules; time_s is {share:g} of that"
    return (
        f"{BASELINE} took {took.seconds:.1f} s and {took.joules:.1f} J: "
        f"time_s = {share * took.seconds:.1f} and joules = {share * took.joules:.1f} are {share:g} of that"
    )


def require_share(share: float) -> None:
    """Check a share from the command line.

    Raises:
        ConfigError: It is not a positive finite number.
    """
    if not 0 < share < math.inf:
        raise ConfigError(f"--{BASELINE}-share: {share:g}; give a share above 0, such as 0.6")
