"""A run from its first round to its last, or from wherever an earlier process of this server left it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from edge_server import run_time
from edge_server.config import LinkConfig
from edge_server.costs import Costs
from edge_server.figures import accuracies, weighted
from edge_server.observing import Observing
from edge_server.round import Rounds
from edge_server.server import Server
from edge_server.store import checkpoints
from edge_server.store.base import (
    AnyRecord,
    Evaluated,
    Measured,
    Rewound,
    RoundClosed,
    RoundOpened,
    RunClosed,
    RunOpened,
    Store,
    UpdateAccepted,
    closed_rounds,
    valid,
)
from edge_server.trial.plan import Plan, test_data
from edge_server.versions import versions
from shared import payload, spool, tensorfile
from shared.algorithms import ALGORITHMS
from shared.background import background
from shared.clock import utc_seconds
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
    init = rounds.algorithm.init
    at = rounds.persist(resume, store, lambda: init(initial(plan.model, plan.seed), plan.seed))
    return await _play(rounds, await at)


async def _play(rounds: Rounds, at: Resumption) -> State:
    """Do what is left of a run."""
    plan, store = rounds.plan, rounds.store
    state, first, opened, accepted = at.state, at.number, at.opened, at.accepted
    del at  # it would keep the first state for as long as the run lasts
    if rounds.test is not None:
        require_fit(rounds.network, state.tree, rounds.test)
    records, end = store.records(), RunClosed(outcome="finished")
    if any(isinstance(record, RunClosed) for record in records):
        log.info("run %s has ended before", rounds.run)
        return state
    async with _observing(rounds, records), _costs(rounds, records) as costs:
        if plan.measure.seconds and not any(isinstance(record, Measured) for record in records):
            await rounds.persist(store.append, await _measure_on_devices(rounds, state))
        for number in range(first, plan.rounds + 1):
            state, closed = await rounds.next(number, state, opened, accepted)
            opened, accepted = None, {}
            log.info("%s", _line(rounds.run, closed, plan.rounds))
            if closed.outcome == "missed" and plan.round.on_missed == "stop":
                end = RunClosed(outcome="stopped", cause=f"round {number} had too few updates")
                break
        for closed in closed_rounds(store.records())[-1:]:
            fleet = rounds.server.fleet
            await costs.settled(closed.round, set(closed.arrived) & set(fleet.online) & set(fleet.reports))
        if plan.evaluation.on_device and end.outcome == "finished":
            await rounds.persist(store.append, await _evaluate_on_devices(rounds, state))
    await rounds.persist(store.append, end)
    return state


@asynccontextmanager
async def _observing(rounds: Rounds, records: list[AnyRecord]) -> AsyncIterator[None]:
    """Record who comes and goes and what the devices measure, while the block lasts."""
    server, store = rounds.server, rounds.store
    is_live = any(isinstance(record, RunOpened) and record.started for record in store.records())
    now_utc_s = utc_seconds() if is_live else None
    await rounds.persist(store.append, run_time.began(records, at=server.clock(), utc_s=now_utc_s, versions=versions()))
    observing = Observing(server.clock, lambda batch: server.worker(store.extend, batch))
    observing.begin(records, server.fleet)
    server.seen.append(observing.presence)
    server.keep.append(observing.report)
    try:
        async with background(observing.keep()):
            rounds.opening = observing.settled
            yield
            await observing.settled()
    finally:
        server.seen.remove(observing.presence)
        server.keep.remove(observing.report)


@asynccontextmanager
async def _costs(rounds: Rounds, records: list[AnyRecord]) -> AsyncIterator[Costs]:
    """Record what the devices say that tasks cost them, while the block lasts."""
    store = rounds.store
    costs = Costs(rounds.run, rounds.plan.rounds + 1, lambda record: rounds.persist(store.append, record))
    costs.recall(records)
    for report in rounds.server.fleet.reports.values():
        costs.hear(report)
    rounds.server.keep.append(costs.hear)
    try:
        async with background(costs.keep()):
            yield costs
    finally:
        rounds.server.keep.remove(costs.hear)


def _require_same_plan(records: list[AnyRecord], plan: Plan) -> None:
    for record in records:
        if isinstance(record, RunOpened) and record.plan != plan:
            raise ConfigError(f"run: {record.run!r} was begun with another plan; name another run, or restore its plan")


async def _evaluate_on_devices(rounds: Rounds, state: State) -> Evaluated:
    """Let every device that is there try the final model on the examples it held back."""
    number = rounds.plan.rounds + 1
    assignments = await rounds.assignments(state, number)
    gather = await rounds.exchange(number, state, assignments, accepted={}, purpose="evaluate")
    updates = {device: record.update for device, record in sorted(gather.accepted.items())}
    by_device = {device: update.metrics for device, update in updates.items()}
    return Evaluated(accuracy=weighted(accuracies(updates)), by_device=by_device)


async def _measure_on_devices(rounds: Rounds, state: State) -> Measured:
    """Let every device that is there time training steps, before anything is decided for it."""
    assignments = await rounds.assignments(state, 0)
    gather = await rounds.exchange(0, state, assignments, accepted={}, purpose="measure")
    updates = {device: record.update for device, record in sorted(gather.accepted.items())}
    for device, cause in gather.failed.items():
        log.warning("device %s measured no training step: %s", device, cause)
    return Measured(
        by_device={device: update.step for device, update in updates.items() if update.step},
        metrics={device: update.metrics for device, update in updates.items() if update.metrics},
        failed=gather.failed,
    )


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
        return Resumption(state, number, *_open_round(store.updates, records, number))


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
    path, params = folder / record.device, record.update.params
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
