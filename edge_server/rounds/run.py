"""A run from its first round to its last, or from wherever an earlier process of this server left it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from edge_server.fleet import membership
from edge_server.fleet.classes import ClassNames
from edge_server.fleet.hub import Server
from edge_server.fleet.inputs import RunInputs
from edge_server.fleet.membership import Members, Muster
from edge_server.fleet.observe import Observing
from edge_server.fleet.state import select_devices
from edge_server.journal import run_clock
from edge_server.journal.budget import Ledger, spent_budget
from edge_server.journal.checkpoints import Store
from edge_server.journal.costs import Costs
from edge_server.journal.outcome import frequent_cause, name_some
from edge_server.journal.records import (
    AnyRecord,
    Joined,
    LeftOut,
    Measured,
    Noted,
    RoundClosed,
    RoundOpened,
    RunClosed,
    RunOpened,
    UpdateAccepted,
    closed_rounds,
)
from edge_server.journal.runs import describe_differences, require_record, versions
from edge_server.plan.inputs import planned_inputs
from edge_server.plan.plan import Plan, is_same_plan, test_data
from edge_server.plan.sections import BudgetPlan
from edge_server.plan.server_config import LinkConfig
from edge_server.rounds.check_update import keep_only
from edge_server.rounds.evaluation import evaluate
from edge_server.rounds.evaluation.running_statistics import batches_of, settle_batches
from edge_server.rounds.neighbours import Neighbours, plan_of_site
from edge_server.rounds.repeat import Repetition, reason_to_end
from edge_server.rounds.resume import Resumption, resume
from edge_server.rounds.round import Rounds
from shared.algorithms import ALGORITHMS
from shared.algorithms.base import Algorithm, evaluated
from shared.data.classes import as_told, contrast
from shared.data.examples import Examples
from shared.data.load import load
from shared.errors import ConfigError, Infeasible, is_cause
from shared.models.base import Model
from shared.models.build import DRAW, blank, initial
from shared.models.evaluate import require_fit
from shared.protocol.messages import Report, Status
from shared.registry import build
from shared.runtime.clock import utc_seconds
from shared.runtime.executor import background
from shared.tensors.placement import CPU, Device
from shared.tensors.tree import State, Tree

log = logging.getLogger(__name__)


def recall_members(rounds: Rounds, records: Iterable[AnyRecord]) -> None:
    """Learn from a run's journal who was ever there, who cannot do its tasks, and who said nothing."""
    every = list(records)
    rounds.muster.seen |= {record.device for record in every if isinstance(record, Joined)}
    for record in every:
        if isinstance(record, LeftOut) and record.silent:
            rounds.muster.silent.recall(record.device, record.instance)
        elif isinstance(record, LeftOut):
            rounds.muster.broken[record.device] = record.instance
        elif isinstance(record, UpdateAccepted):
            rounds.muster.silent.forget(record.device)


async def leave_out_broken(rounds: Rounds, closed: RoundClosed) -> None:
    """Ask no more who cannot do its tasks before its operator has edited something, until its agent is started anew."""
    statuses = rounds.server.fleet.statuses
    able = {device: cause for device, cause in closed.failed.items() if is_cause(cause, ConfigError)}
    found = {device: cause for device, cause in able.items() if device in statuses}
    for device, cause in found.items():
        instance = rounds.muster.broken[device] = statuses[device].instance
        at = rounds.server.clock()
        left_out = LeftOut(device=device, instance=instance, cause=cause, round=closed.round, at=at)
        await rounds.persist(rounds.store.append, left_out)
    if found:
        verb, whose = ("takes", "its agent is") if len(found) == 1 else ("take", "their agents are")
        log.warning("%s %s no part until %s started anew", name_some(sorted(found)), verb, whose)


def known_classes(
    plan: Plan, test: Examples | None, labelled: Examples | None, records: Iterable[AnyRecord]
) -> ClassNames | None:
    """Return what a run's classes are called, as far as plan, the server's own examples or the journal say so.

    Args:
        plan: It may name them.
        test: What the server evaluates with.
        labelled: What it trains on itself.
        records: Of an earlier process, in which the devices may have agreed.

    Raises:
        ConfigError: The server's own examples differ among themselves.
    """
    if plan.data and plan.data.classes:
        return ClassNames(plan.data.classes, "the plan's are", is_planned=True)
    own = [as_told(one.classes) for one in (test, labelled) if one is not None]
    if len(set(own)) > 1:
        raise ConfigError("data and server_data have other classes: {}; {}".format(*contrast(*own)))
    if own:
        return ClassNames(own[0], "those of the server's own examples are")
    opened = [one.classes for one in records if isinstance(one, RoundOpened) and one.classes]
    return ClassNames(as_told(opened[-1]), "those that the run began with are") if opened else None


def known_inputs(plan: Plan, records: Iterable[AnyRecord]) -> RunInputs | None:
    """Return how a run's inputs are prepared, as far as the plan or the journal say so.

    Args:
        plan: It may say so in its sections of data.
        records: Of an earlier process, in which the devices may have agreed.

    Raises:
        ConfigError: Sections of the plan differ.
    """
    if agreed := [one.inputs for one in records if isinstance(one, RoundOpened) and one.inputs]:
        return RunInputs(agreed[-1], "the run began with")
    planned = planned_inputs(plan)
    return None if planned is None else RunInputs(planned, "the plan has")


async def run_plan(  # noqa: PLR0913 - everything that a run is made of
    plan: Plan,
    run: str,
    server: Server,
    store: Store,
    link: LinkConfig,
    *,
    started: str,
    members: Members = None,
    draw: str = DRAW,
    device: Device = CPU,
    graph: bytes = b"",
    neighbours: Neighbours | None = None,
    told: Mapping[int, RoundOpened] | None = None,
) -> State:
    """Run a plan to its end, or go on with it; return the final server state.

    Args:
        store: The run's store; empty for a new run.
        started: Calendar time for people.
        members: The devices that may take part; None for whoever connects.
        draw: Who draws a new run's first weights; a run that was begun keeps its own.
        device: What the server trains and evaluates with.
        graph: What devices evaluate by, with ONNX Runtime; empty where their trainers do it.
        neighbours: The other sites of a plan with several.
        told: What another run told the devices in each round, which is told again; None for what is decided.

    Raises:
        ConfigError: The plan names something unknown, its data cannot be read, or the run was begun with another plan.
    """
    server.run = run
    records, algorithm = store.records(), build(ALGORITHMS, plan.algorithm, "algorithm")
    new = RunOpened(run=run, plan=plan, started=started, draw=draw, statistics_batches=batches_of(plan, algorithm))
    begun = _begun(records, plan) or new
    test, labelled = own = await _server_examples(plan, server)
    rounds = Rounds(
        *(run, _settled_plan(begun, server.site), server, store, algorithm, link, _network(plan, test), test),
        muster=replace(await server.worker(build_muster, plan, algorithm, own, records), members=members),
        labelled=labelled,
        device=device,
        graph=graph,
        neighbours=neighbours,
        told=told or {},
    )
    return await _play_and_leave(rounds, begun)


def _network(plan: Plan, test: Examples | None) -> Model:
    """Return the plan's network without storage, made for inputs such as the server's."""
    return replace(blank(plan.model), example=() if test is None else tuple(test.inputs.shape[1:]))


def build_muster(
    plan: Plan, algorithm: Algorithm, own: tuple[Examples | None, Examples | None], records: Sequence[AnyRecord]
) -> Muster:
    """Build a run's muster with the class names and inputs that are known before any device has told its own.

    Args:
        own: The server's examples for evaluation and for training; None for none.
        records: The run's journal so far.

    Raises:
        ConfigError: The server's own examples differ among themselves.
    """
    reads = algorithm.reads_labels or plan.evaluation.devices_every > 0
    classes, inputs = known_classes(plan, *own, records), known_inputs(plan, records)
    return Muster(classes=classes, reads_labels=reads, inputs=inputs)


async def _play_and_leave(rounds: Rounds, begun: RunOpened) -> State:
    """Do what is left of a run, then tell the other sites that it has ended."""
    await _record_beginning(rounds, begun)
    state = await _play(rounds, partial(_stand, rounds, begun.draw))
    if rounds.neighbours:
        await rounds.neighbours.leave()
    return state


def _settled_plan(begun: RunOpened, site: str) -> Plan:
    """Return the plan that a run was begun with, as this site acts by it."""
    return plan_of_site(settle_batches(begun.plan, begun.statistics_batches), site)


async def _server_examples(plan: Plan, server: Server) -> tuple[Examples | None, Examples | None]:
    """Return what the server evaluates with, and what it trains on itself."""
    test = await server.worker(load, test_data(plan)) if plan.evaluation.every else None
    return test, await server.worker(load, plan.server_data) if plan.server_data else None


async def _record_beginning(rounds: Rounds, begun: RunOpened) -> None:
    """Record how a run begins, where no earlier process did."""
    if not rounds.store.records():
        require_record(rounds.store.folder)
        await rounds.persist(rounds.store.append, begun)


async def _stand(rounds: Rounds, draw: str) -> Resumption:
    """Return where a run stands."""
    (plan, init), split = (rounds.plan, rounds.algorithm.init), rounds.algorithm.split is not None
    return await rounds.persist(
        resume, rounds.store, lambda: init(initial(plan.model, plan.seed, draw), plan.seed), split=split
    )


def _require_examples(rounds: Rounds, tree: Tree) -> None:
    """Refuse examples of the server's that its network or its method cannot take, before anybody is given a task."""
    for examples, source in ((rounds.test, ""), (rounds.labelled, "server_data")):
        if examples is not None:
            require_fit(rounds.model.layers, tree, examples, source)
    server, labelled = rounds.algorithm.server, rounds.labelled
    if server and server.check and labelled is not None:
        server.check(rounds.model, (labelled.inputs, labelled.labels), rounds.plan.hyper)


async def _play(rounds: Rounds, stand: Callable[[], Awaitable[Resumption]]) -> State:
    """Do what is left of a run; `stand` tells where it stands."""
    plan, store = rounds.plan, rounds.store
    at = await stand()
    state = at.state
    _require_examples(rounds, evaluated(rounds.algorithm, state))
    records, ledger = store.records(), Ledger()
    if any(isinstance(record, RunClosed) for record in records):
        log.info("run %s has ended before", rounds.run)
        return state
    async with _observing(rounds, records), _costs(rounds, records) as costs:
        await _measure_on_devices(rounds, state, records)
        recall_members(rounds, records)
        repetition = Repetition(rounds, is_live(records), costs.repeat)
        following = at.number if at.opened else await repetition.after(closed_rounds(records), at.number)
        opened, accepted = at.opened, at.accepted
        del at  # its state would be kept for as long as the run lasts
        while not isinstance(following, RunClosed) and following <= plan.rounds:
            if end := None if opened else await _between(rounds, state, ledger, following - 1):
                following = end
                break
            already_s = await _already_s(rounds, opened) if opened else repetition.pause_s
            try:
                state, closed = await rounds.next(following, state, opened, accepted, already_s=already_s)
            except Infeasible as error:
                following = RunClosed(outcome="stopped", cause=str(error))
                break
            opened, accepted = None, {}
            log.info("%s", _line(rounds.run, closed, plan.rounds))
            await leave_out_broken(rounds, closed)
            following = await repetition.after([closed], following + 1)
            if repetition.is_behind:
                state, repetition.is_behind = (await stand()).state, False
        end = following if isinstance(following, RunClosed) else RunClosed(outcome="finished")
        await _conclude(rounds, state, costs, end, ledger)
        await _note_doubts(rounds, ledger)
    if end.cause:
        log.warning("run %s %s: %s", rounds.run, "is over" if end.outcome == "finished" else "ends short", end.cause)
    await rounds.persist(store.append, end)
    await rounds.server.worker(keep_only, store.updates, ())  # they are in the model, and nobody asks for them again
    return state


async def _conclude(rounds: Rounds, state: State, costs: Costs, end: RunClosed, ledger: Ledger) -> None:
    """Wait for what the last round cost, and let devices evaluate if that is due."""
    records = rounds.store.records()
    ledger.take(records[ledger.seen :])  # a long journal is not read once more for that
    for closed in closed_rounds(records)[-1:]:
        fleet = rounds.server.fleet
        await costs.settled(closed.round, set(closed.arrived) & set(fleet.online) & set(fleet.reports))
    if end.outcome == "finished":
        await evaluate.evaluate_due(rounds, state)


async def _between(rounds: Rounds, state: State, ledger: Ledger, after: int) -> RunClosed | None:
    """Do what is due after a round; return the run's end, None where it goes on."""
    await evaluate.evaluate_due(rounds, state, after)
    if over := await reason_to_end(rounds, state):
        return RunClosed(outcome="finished", cause=over)
    cause = await _spent(rounds, ledger)
    return RunClosed(outcome="stopped", cause=cause) if cause else None


async def _already_s(rounds: Rounds, opened: RoundOpened) -> float:
    """Return how long ago an earlier process opened a round; the record says how well that is known."""
    found = run_clock.elapsed_since(rounds.store.records(), opened, rounds.server.clock())
    how = "by the calendar" if found.is_known else "as far as is known: the calendar does not tell how long it was away"
    what = f"round {opened.round} {run_clock.RESTARTED}: its seconds count from its opening, {how}"
    if found.away_s >= 1:
        what += f"; up to {found.away_s:.0f} of them it was away, and nobody worked on the round"
    await rounds.persist(rounds.store.append, Noted(what=what))
    return found.seconds


async def _spent(rounds: Rounds, ledger: Ledger) -> str:
    """Return which budget lets no further round begin, empty where all do; leave out whose joules nobody knows."""
    budget, muster, fleet = rounds.plan.budget, rounds.muster, rounds.server.fleet
    if budget == BudgetPlan():
        return ""
    await _note_doubts(rounds, ledger)
    spent = ledger.spending()
    if budget.joules is not None:
        muster.unmetered = frozenset(spent.unmetered)
    if muster.here(fleet) and not muster.ready(fleet):
        dark = ", ".join(muster.here(fleet)[:8])
        return f"budget.joules: no device tells its joules ({dark}): give them a meter, or take the budget away"
    return spent_budget(budget, spent)


async def _note_doubts(rounds: Rounds, ledger: Ledger) -> None:
    """Record whose claims of joules are not believed, each device once, after taking the journal's next records."""
    ledger.take(await rounds.server.worker(rounds.store.records, ledger.seen))
    for what in ledger.doubts()[: membership.MOST_NAMED]:
        log.warning("%s", what)
        await rounds.persist(rounds.store.append, Noted(what=what))


@asynccontextmanager
async def _observing(rounds: Rounds, records: list[AnyRecord]) -> AsyncIterator[None]:
    """Record who comes and goes and what the devices measure, while the block lasts."""
    server, store = rounds.server, rounds.store
    now_utc_s = utc_seconds() if is_live(store.records()) else None
    await rounds.persist(
        store.append, run_clock.server_began(records, at=server.clock(), utc_s=now_utc_s, versions=versions())
    )
    observing = Observing(server.clock, lambda batch: server.worker(store.extend, batch))
    muster = rounds.muster

    def presence(status: Status) -> None:
        if muster.takes(status.device):
            observing.presence(status)

    def report(report: Report) -> None:
        if muster.takes(report.device):
            observing.report(report)

    observing.begin(records, select_devices(server.fleet, muster.takes))
    server.seen.append(presence)
    server.keep.append(report)
    try:
        async with background(observing.keep()):
            rounds.opening = observing.settled
            yield
            await observing.settled()
    finally:
        server.seen.remove(presence)
        server.keep.remove(report)


@asynccontextmanager
async def _costs(rounds: Rounds, records: list[AnyRecord]) -> AsyncIterator[Costs]:
    """Record what the devices say that tasks cost them, while the block lasts."""
    costs = Costs(rounds.run, rounds.plan.rounds, lambda record: rounds.persist(rounds.store.append, record))
    costs.recall(records)
    for report in rounds.server.fleet.reports.values():
        costs.hear(report)
    rounds.server.keep.append(costs.hear)
    try:
        async with background(costs.keep()):
            yield costs
    finally:
        rounds.server.keep.remove(costs.hear)


def is_live(records: Iterable[AnyRecord]) -> bool:
    """Tell whether a run is of real devices: it was begun at a calendar time."""
    return any(isinstance(record, RunOpened) and record.started for record in records)


def _begun(records: list[AnyRecord], plan: Plan) -> RunOpened | None:
    begun = next((record for record in records if isinstance(record, RunOpened)), None)
    if begun and not is_same_plan(begun.plan, plan):
        others = describe_differences(begun.plan, plan)
        raise ConfigError(
            f"run: {begun.run!r} was begun with another plan ({others}); name another run, or restore its plan"
        )
    return begun


async def _measure_on_devices(rounds: Rounds, state: State, records: list[AnyRecord]) -> None:
    """Let every device that is there time training steps, before anything is decided for it; if the plan says so."""
    if not rounds.plan.measure.seconds or any(isinstance(record, Measured) for record in records):
        return
    assignments = (await rounds.assigning.next(state, 0, "measure")).assignments
    gather = await rounds.exchange(0, state, assignments, accepted={}, purpose="measure")
    updates = {device: record.update for device, record in sorted(gather.accepted.items())}
    for device, cause in gather.failed.items():
        log.warning("device %s measured no training step: %s", device, cause)
    measured = Measured(
        by_device={device: update.step for device, update in updates.items() if update.step},
        metrics={device: update.metrics for device, update in updates.items() if update.metrics},
        failed=gather.failed,
    )
    await rounds.persist(rounds.store.append, measured)


def _line(run: str, closed: RoundClosed, rounds: int) -> str:
    accuracy = "" if closed.accuracy is None else f" accuracy={closed.accuracy:.4f}"
    loss = "" if closed.loss is None else f" loss={closed.loss:.4f}"
    refused = f" refused={sum(closed.refused.values())}" if closed.refused else ""
    failed = f" failed={len(closed.failed)}: {frequent_cause(closed.failed)}" if closed.failed else ""
    return (
        f"round={closed.round}/{rounds} run={run} {closed.outcome} updates={len(closed.arrived)}"
        f"{accuracy}{loss} seconds={closed.seconds:.3f}{refused}{failed}"
    )
