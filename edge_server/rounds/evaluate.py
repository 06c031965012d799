"""Schedule and record evaluations on devices, within the run's budget."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from edge_server.journal.budget import Ledger
from edge_server.journal.compared import devices_value
from edge_server.journal.compared_metric import ACCURACY
from edge_server.journal.costs import costs_by_round
from edge_server.journal.records import (
    AnyRecord,
    Evaluated,
    Noted,
    RoundClosed,
    select,
    valid_records,
)
from edge_server.plan.plan import Plan
from edge_server.rounds.round import Rounds
from edge_server.rounds.round_figures import mean_accuracy, merge_device_metrics, record_metric
from shared.protocol.measurements import joule_parts
from shared.tensors.tree import State

log = logging.getLogger(__name__)


def _is_due(plan: Plan, after: int) -> bool:
    every = plan.evaluation.devices_every
    return bool(every and after and after % every == 0)


def find_due_evaluation(plan: Plan, records: Sequence[AnyRecord], *, ended: bool) -> int | None:
    """Return the round after which an evaluation is due; None if it is not due or already done.

    Args:
        ended: Whether there are no more rounds.
    """
    evaluation = plan.evaluation
    last = max((record.round for record in valid_records(records, RoundClosed)), default=0)
    if not (_is_due(plan, last) or (ended and (evaluation.on_device or evaluation.devices_every))):
        return None
    done = {record.round for record in valid_records(records, Evaluated)}
    return None if done & {None, last} else last


def explain_unaffordable(plan: Plan, records: Sequence[AnyRecord]) -> str:
    """Return why the energy budget does not pay for an evaluation, by the cost of the last one; empty if it does."""
    if plan.budget.joules is None:
        return ""
    ledger = Ledger()
    ledger.take(records)
    spending = ledger.spending()
    left_j = plan.budget.joules + spending.moved - (spending.joules or 0.0)
    tried = [record.round for record in valid_records(records, Evaluated) if record.round is not None]
    last = costs_by_round(records).get(plan.evaluation.number(plan.rounds, tried[-1]), {}) if tried else {}
    parts = [getattr(cost, name) for cost in last.values() for name in joule_parts(split=False)]
    foreseen = math.fsum(joules for joules in parts if joules is not None)
    if left_j > 0 and foreseen <= left_j:
        return ""
    last_one = f", and the last one took {foreseen:.4g} J" if foreseen else ""
    return f"{max(0.0, left_j):.4g} J are left of budget.joules{last_one}"


async def evaluate_due(rounds: Rounds, state: State, after: int | None = None) -> None:
    """Evaluate on every online device if due, and record the result.

    Args:
        after: The last round; None if there are no more.
    """
    evaluation = rounds.run.plan.evaluation
    evaluates = evaluation.on_device or evaluation.devices_every
    if not evaluates or (after is not None and not _is_due(rounds.run.plan, after)):
        return  # cheap check before reading a long journal
    records, worker = rounds.run.store.records(), rounds.run.server.worker
    after = await worker(find_due_evaluation, rounds.run.plan, records, ended=after is None)
    if after is None:
        return
    if why := await worker(explain_unaffordable, rounds.run.plan, records):
        what = f"the devices' evaluation after round {after} is left out: {why}"
        if Noted(what=what) not in select(records, Noted):
            log.warning("%s", what)
            await rounds.run.record(Noted(what=what))
        return
    number = rounds.run.plan.evaluation.number(rounds.run.plan.rounds, after)
    personal = rounds.run.algorithm.personal is not None
    assignments = (await rounds.assigner.assign_tasks(state, number, "evaluate")).assignments
    gather = await rounds.exchange.perform(number, state, assignments, accepted={}, purpose="evaluate")
    updates = {device: record.update for device, record in sorted(gather.accepted.items())}
    by_device = {device: update.metrics for device, update in updates.items()}
    accuracy = mean_accuracy(updates, personal=personal)
    metrics = merge_device_metrics(rounds.run.model.objective, updates, personal=personal)
    evaluated = Evaluated(accuracy=accuracy, by_device=by_device, round=after, personal=personal, metrics=metrics)
    await rounds.run.record(evaluated)
    metric = record_metric(rounds.run.model.objective) or ACCURACY
    value = devices_value(evaluated, metric)
    name, figure = (
        f"{'personal' if personal else 'device'}_{metric.name}",
        "" if value is None else metric.format(value),
    )
    log.info(
        "round=%d/%d run=%s devices=%d %s=%s",
        after,
        rounds.run.plan.rounds,
        rounds.run.name,
        len(updates),
        name,
        figure,
    )
