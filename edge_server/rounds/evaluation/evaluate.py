"""When the devices evaluate, and what comes of it: the model, or each its own, on the examples that they hold back."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence

from edge_server.journal.budget import Ledger
from edge_server.journal.costs import by_round
from edge_server.journal.records import AnyRecord, Evaluated, Noted, closed_rounds, valid
from edge_server.plan.plan import Plan
from edge_server.rounds.evaluation.round_figures import mean_accuracy
from edge_server.rounds.round import Rounds
from shared.protocol.measurements import joule_parts
from shared.tensors.tree import State

log = logging.getLogger(__name__)


def _is_due(plan: Plan, after: int) -> bool:
    every = plan.evaluation.devices_every
    return bool(every and after and after % every == 0)


def evaluation_due(plan: Plan, records: Iterable[AnyRecord], *, ended: bool) -> int | None:
    """Return after which round the devices are still to evaluate; None where they are not, or have done so.

    Args:
        plan: What it says of evaluation.
        ended: Whether there will be no more rounds.
    """
    kept, evaluation = valid(records), plan.evaluation
    last = max((record.round for record in closed_rounds(kept)), default=0)
    if not (_is_due(plan, last) or (ended and (evaluation.on_device or evaluation.devices_every))):
        return None
    done = {record.round for record in kept if isinstance(record, Evaluated)}
    return None if done & {None, last} else last


def unaffordable(plan: Plan, records: Sequence[AnyRecord]) -> str:
    """Return why a budget of joules pays for no evaluation, as far as earlier ones tell; empty where it does.

    Args:
        plan: What it says of the budget.
    """
    if plan.budget.joules is None:
        return ""
    ledger = Ledger()
    ledger.take(records)
    spending = ledger.spending()
    left = plan.budget.joules + spending.moved - (spending.joules or 0.0)
    tried = [one.round for one in valid(records) if isinstance(one, Evaluated) and one.round is not None]
    last = by_round(records).get(plan.evaluation.number(plan.rounds, tried[-1]), {}) if tried else {}
    parts = [getattr(cost, name) for cost in last.values() for name in joule_parts(split=False)]
    foreseen = math.fsum(one for one in parts if one is not None)
    if left > 0 and foreseen <= left:
        return ""
    last_one = f", and the last one took {foreseen:.4g} J" if foreseen else ""
    return f"{max(0.0, left):.4g} J are left of budget.joules{last_one}"


async def evaluate_due(rounds: Rounds, state: State, after: int | None = None) -> None:
    """Let every device that is there evaluate, if that is owed; record what comes of it, whatever that is.

    Args:
        state: The server state as it stands.
        after: The last round; None if there will be no more.
    """
    owed = rounds.plan.evaluation
    if not (owed.on_device or owed.devices_every) or (after is not None and not _is_due(rounds.plan, after)):
        return  # as the records would tell, which are many
    records = await rounds.server.worker(rounds.store.records)
    after = evaluation_due(rounds.plan, records, ended=after is None)
    if after is None:
        return
    if why := unaffordable(rounds.plan, records):
        what = f"the devices' evaluation after round {after} is left out: {why}"
        if Noted(what=what) not in records:
            log.warning("%s", what)
            await rounds.persist(rounds.store.append, Noted(what=what))
        return
    number = rounds.plan.evaluation.number(rounds.plan.rounds, after)
    personal = rounds.algorithm.personal is not None
    assignments = (await rounds.assigning.next(state, number, "evaluate")).assignments
    gather = await rounds.exchange(number, state, assignments, accepted={}, purpose="evaluate")
    updates = {device: record.update for device, record in sorted(gather.accepted.items())}
    by_device = {device: update.metrics for device, update in updates.items()}
    accuracy = mean_accuracy(updates, personal=personal)
    evaluated = Evaluated(accuracy=accuracy, by_device=by_device, round=after, personal=personal)
    await rounds.persist(rounds.store.append, evaluated)
    name, shown = "personal_accuracy" if personal else "device_accuracy", "" if accuracy is None else f"{accuracy:.4f}"
    log.info("round=%d/%d run=%s devices=%d %s=%s", after, rounds.plan.rounds, rounds.run, len(updates), name, shown)
