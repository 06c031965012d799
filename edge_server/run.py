"""A run from its first round to its last, or from wherever an earlier process of this server left it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edge_server.config import LinkConfig
from edge_server.figures import accuracies, weighted
from edge_server.round import Rounds
from edge_server.server import Server
from edge_server.store import checkpoints
from edge_server.store.base import (
    AnyRecord,
    Evaluated,
    Rewound,
    RoundClosed,
    RoundOpened,
    RunClosed,
    RunOpened,
    Store,
    UpdateAccepted,
    valid,
)
from edge_server.trial.plan import Plan, test_data
from shared import payload, spool, tensorfile
from shared.algorithms import ALGORITHMS
from shared.data.load import load
from shared.errors import ConfigError, CorruptFile
from shared.evaluate import require_fit, skeleton
from shared.models.init import initial
from shared.registry import build
from shared.tree import State

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumption:
    """Where a run stands: the state, the next round, and what of that round is done."""

    state: State
    number: int
    opened: RoundOpened | None
    accepted: dict[str, UpdateAccepted]


async def run_plan(plan: Plan, run: str, server: Server, store: Store, link: LinkConfig, *, started: str) -> State:
    """Run a plan to its end, or go on with it; return the final server state.

    Args:
        plan: What to do.
        run: The run's name.
        server: The site, listening.
        store: The run's store; empty for a new run.
        link: How payloads travel.
        started: Calendar time for people.

    Raises:
        ConfigError: The plan names something unknown, its data cannot be read, or the run was begun with another plan.
    """
    server.run = run
    records = store.records()
    _require_same_plan(records, plan)
    rounds = Rounds(
        run=run,
        plan=plan,
        server=server,
        store=store,
        algorithm=build(ALGORITHMS, plan.algorithm, "algorithm"),
        link=link,
        network=skeleton(plan.model),
        test=await server.worker(load, test_data(plan)) if plan.evaluation.every else None,
    )
    if not records:
        await rounds.persist(store.append, RunOpened(run=run, plan=plan, started=started))
    at = await rounds.persist(resume, store, lambda: rounds.algorithm.init(initial(plan.model, plan.seed), plan.seed))
    state, first, opened, accepted = at.state, at.number, at.opened, at.accepted
    del at  # it would keep the first state for as long as the run lasts
    if rounds.test is not None:
        require_fit(rounds.network, state.tree, rounds.test)
    if any(isinstance(record, RunClosed) for record in records):
        log.info("run %s has ended before", run)
        return state
    for number in range(first, plan.rounds + 1):
        state, closed = await rounds.next(number, state, opened, accepted)
        opened, accepted = None, {}
        log.info("%s", _line(run, closed, plan.rounds))
        if closed.outcome == "missed" and plan.round.on_missed == "stop":
            stopped = RunClosed(outcome="stopped", cause=f"round {number} had too few updates")
            await rounds.persist(store.append, stopped)
            return state
    if plan.evaluation.on_device:
        await rounds.persist(store.append, await _evaluate_on_devices(rounds, state))
    await rounds.persist(store.append, RunClosed(outcome="finished"))
    return state


def _require_same_plan(records: list[AnyRecord], plan: Plan) -> None:
    for record in records:
        if isinstance(record, RunOpened) and record.plan != plan:
            raise ConfigError(f"run: {record.run!r} was begun with another plan; name another run, or restore its plan")


async def _evaluate_on_devices(rounds: Rounds, state: State) -> Evaluated:
    """Let every device that is there try the final model on the examples it held back."""
    number = rounds.plan.rounds + 1
    assignments = await rounds.assignments(state, number)
    gather = await rounds.exchange(number, state, assignments, accepted={}, train=False)
    updates = {device: record.update for device, record in sorted(gather.accepted.items())}
    by_device = {device: update.metrics for device, update in updates.items()}
    return Evaluated(accuracy=weighted(accuracies(updates)), by_device=by_device)


def resume(store: Store, init: Callable[[], State]) -> Resumption:
    """Find out where a run stands; a lost checkpoint sends it back to the one before."""
    while True:
        records = valid(store.records())
        closed = [record for record in records if isinstance(record, RoundClosed)]
        number = max((record.round for record in closed), default=0) + 1
        aggregated = [record.round for record in closed if record.outcome == "aggregated"]
        try:
            state = store.load(aggregated[-1]) if aggregated else init()
        except (CorruptFile, FileNotFoundError) as error:
            cause = str(error)
            if isinstance(error, CorruptFile):
                aside = tensorfile.set_aside(checkpoints.path_of(store.folder / "checkpoints", aggregated[-1]))
                cause += f"; set aside as {aside.name}"
            log.warning("going back to before round %d: %s", aggregated[-1], cause)
            store.append(Rewound(round=aggregated[-1], cause=cause))
            continue
        if number > 1:
            log.info("going on with round %d", number)
        return Resumption(state, number, *_open_round(store.folder, records, number))


def _open_round(
    folder: Path, records: list[AnyRecord], number: int
) -> tuple[RoundOpened | None, dict[str, UpdateAccepted]]:
    """Return the beginning of a round that has not ended, and the updates of it that are stored."""
    opened = [record for record in records if isinstance(record, RoundOpened) and record.round == number]
    accepted = {
        record.device: record
        for record in records
        if isinstance(record, UpdateAccepted) and record.round == number and _is_stored(folder, record)
    }
    return (opened[-1], accepted) if opened else (None, {})


def _is_stored(folder: Path, record: UpdateAccepted) -> bool:
    """Tell whether an accepted update is still there as it was sent; one that has rotted is asked for again."""
    path, params = folder / "updates" / record.device, record.update.params
    if params is None or (path.exists() and payload.digest([spool.view(path)]) == params.digest):
        return True
    log.warning("the stored update of %s in round %d is damaged, asking for it again", record.device, record.round)
    return False


def _line(run: str, closed: RoundClosed, rounds: int) -> str:
    accuracy = "" if closed.accuracy is None else f" accuracy={closed.accuracy:.4f}"
    loss = "" if closed.loss is None else f" loss={closed.loss:.4f}"
    refused = f" refused={sum(closed.refused.values())}" if closed.refused else ""
    return (
        f"round={closed.round}/{rounds} run={run} {closed.outcome} updates={len(closed.arrived)}"
        f"{accuracy}{loss} seconds={closed.seconds:.3f}{refused}"
    )
