"""Run a plan from its first round, or resume it, to its end."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import msgspec

from edge_server.fleet.classes import ClassNames
from edge_server.fleet.hub import Server
from edge_server.fleet.inputs import RunInputs
from edge_server.fleet.membership import MOST_NAMED, Members, Membership
from edge_server.fleet.observe import Observer
from edge_server.fleet.state import select_devices
from edge_server.journal import run_clock
from edge_server.journal.budget import Ledger, describe_spent_budget
from edge_server.journal.checkpoints import Store
from edge_server.journal.compared import measured_rounds, server_value
from edge_server.journal.compared_metric import ACCURACY
from edge_server.journal.costs import Costs
from edge_server.journal.outcome import frequent_cause, name_some
from edge_server.journal.records import (
    SERVER_RESTARTED,
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
    enumerate_records,
    first,
    select,
    valid_records,
)
from edge_server.journal.runs import describe_differences, read_versions, require_journal
from edge_server.learner import blank_network, describe_trained, initial_network, plan_algorithm
from edge_server.plan.budget import BudgetPlan
from edge_server.plan.data import test_data
from edge_server.plan.inputs import planned_inputs
from edge_server.plan.plan import Plan, is_same_plan
from edge_server.plan.server_config import LinkConfig
from edge_server.rounds import evaluate
from edge_server.rounds.active_run import ActiveRun
from edge_server.rounds.check_update import prune_updates
from edge_server.rounds.input_statistics import add_moments, find_measured, fold_sums, is_federated, request_sums
from edge_server.rounds.neighbours import Neighbours, plan_of_site
from edge_server.rounds.plugins import plan_plugins, require_recorded, task_plugins
from edge_server.rounds.pretrained import check_weights
from edge_server.rounds.repeat import Repetition, reason_to_end
from edge_server.rounds.resume import Resumption, resume
from edge_server.rounds.round import Rounds
from edge_server.rounds.round_figures import noted_devices, record_metric
from edge_server.rounds.running_statistics import choose_batches, set_batches
from shared.algorithms.base import Algorithm, evaluated_parameters
from shared.data.assigned import with_moments
from shared.data.classes import contrast, normalise_class_names
from shared.data.examples import Examples
from shared.data.load import load
from shared.errors import ConfigError, Infeasible, is_cause
from shared.models.base import Model
from shared.models.build import DRAW
from shared.models.evaluate import require_matching_examples
from shared.objectives.base import build_objective
from shared.objectives.training import build_training_objective
from shared.protocol.inputs import Inputs
from shared.protocol.messages import ADAPTATION, NORMALISE, OBJECTIVE, PLUGINS, STEP_FIELD, Report, Status
from shared.runtime.clock import utc_seconds
from shared.runtime.executor import background
from shared.tensors.placement import Device
from shared.tensors.tree import CPU, State, Tree

log = logging.getLogger(__name__)

UNMEASURED = Inputs()
"""Inputs whose mean and deviation are not measured."""


def restore_membership(rounds: Rounds, records: Sequence[AnyRecord]) -> None:
    """Restore from the journal which devices were online, broken or silent."""
    membership = rounds.run.membership
    membership.full_precision |= noted_devices(records)
    membership.ever_online |= {record.device for record in select(records, Joined)}
    membership.broken |= {record.device: record.instance for record in select(records, LeftOut) if not record.silent}
    silent = [(number, record) for number, record in enumerate_records(records, LeftOut) if record.silent]
    for record in select(records[silent[0][0] - 1 :], LeftOut, UpdateAccepted) if silent else ():
        if isinstance(record, UpdateAccepted):
            membership.silent.forget(record.device)
        elif isinstance(record, LeftOut) and record.silent:
            membership.silent.restore(record.device, record.instance)


async def exclude_broken(rounds: Rounds, closed: RoundClosed) -> None:
    """Exclude devices with a configuration error until their agents restart: only an operator can fix that."""
    statuses = rounds.run.server.fleet.statuses
    refusals = {device: cause for device, cause in closed.failed.items() if is_cause(cause, ConfigError)}
    broken = {device: cause for device, cause in refusals.items() if device in statuses}
    for device, cause in broken.items():
        instance = rounds.run.membership.broken[device] = statuses[device].instance
        at = rounds.run.server.clock()
        left_out = LeftOut(device=device, instance=instance, cause=cause, round=closed.round, at=at)
        await rounds.run.record(left_out)
    if broken:
        verb, whose = ("takes", "its agent is") if len(broken) == 1 else ("take", "their agents are")
        log.warning("%s %s no part until %s restarted", name_some(sorted(broken)), verb, whose)


def load_class_names(
    plan: Plan, test: Examples | None, labelled: Examples | None, records: Sequence[AnyRecord]
) -> ClassNames | None:
    """Return a run's class names from plan, server data or journal; None if unknown.

    Args:
        test: The server's test data.
        labelled: The server's training data.
        records: Journal of an earlier process, in which devices may have agreed.

    Raises:
        ConfigError: The server's data sets differ in their classes.
    """
    if plan.data and plan.data.classes:
        return ClassNames(plan.data.classes, "the plan's are", is_planned=True)
    class_lists = [normalise_class_names(examples.classes) for examples in (test, labelled) if examples is not None]
    if len(set(class_lists)) > 1:
        raise ConfigError("data and server_data have other classes: {}; {}".format(*contrast(*class_lists)))
    if class_lists:
        return ClassNames(class_lists[0], "those of the server's own examples are")
    agreed = None
    for record in select(records, RoundOpened):
        agreed = record.classes or agreed
    return ClassNames(normalise_class_names(agreed), "those that the run began with are") if agreed else None


def load_run_inputs(plan: Plan, records: Sequence[AnyRecord]) -> RunInputs | None:
    """Return a run's input preparation from plan or journal; None if unknown.

    Args:
        records: Journal of an earlier process, in which devices may have agreed.

    Raises:
        ConfigError: Sections of the plan differ.
    """
    agreed = None
    for record in select(records, RoundOpened):
        agreed = record.inputs or agreed
    if agreed:
        return RunInputs(agreed, "the run began with", is_measured=is_federated(plan))
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
    recorded_rounds: Mapping[int, RoundOpened] | None = None,
) -> State:
    """Run or resume a plan to its end; return the final server state.

    Args:
        store: The run's store; empty for a new run.
        started: Calendar time, for people.
        members: Devices that may take part; None for any that connects.
        draw: Generator of a new run's first weights; a resumed run keeps its own.
        device: Where the server trains and evaluates.
        graph: ONNX graph by which devices evaluate; empty if their trainers do.
        neighbours: The other sites of a multi-site plan.
        recorded_rounds: Recorded rounds whose assignments are repeated, by number; None to assign.

    Raises:
        ConfigError: A name in the plan is unknown, its data cannot be read, or the run has another plan.
    """
    server.rounds.runs.add(run)
    records, algorithm = store.records(), plan_algorithm(plan)
    plugins, metric = plan_plugins(plan), record_metric(build_objective(plan.objective))
    new = RunOpened(run=run, plan=plan, started=started, draw=draw, compared=metric, plugins=plugins or msgspec.UNSET)
    personal = True if algorithm.personal else msgspec.UNSET
    new = msgspec.structs.replace(new, statistics_batches=choose_batches(plan, algorithm), personal=personal)
    begun = await server.worker(check_weights, _find_beginning(records, plan), new)
    require_recorded(begun, plugins)
    test, labelled = examples = await _load_server_examples(plan, server)
    membership = replace(await server.worker(build_membership, plan, algorithm, examples, records), members=members)
    model, site_plan = _blank_network(plan, test), _site_plan(begun, server.site)
    active = ActiveRun(run, site_plan, server, store, algorithm, link, model, membership, device)
    rounds = Rounds(active, test, labelled, graph, neighbours, recorded_rounds or {})
    return await _run_and_leave(rounds, begun)


def _blank_network(plan: Plan, test: Examples | None) -> Model:
    """Return the plan's network without storage, with the input shape of the server's test data."""
    example = () if test is None else tuple(test.inputs.shape[1:])
    return replace(blank_network(plan), example=example, objective=build_training_objective(plan.objective))


def build_membership(
    plan: Plan, algorithm: Algorithm, examples: tuple[Examples | None, Examples | None], records: Sequence[AnyRecord]
) -> Membership:
    """Build a run's membership with the class names and inputs known before any device connects.

    Args:
        examples: The server's test and training data.
        records: The run's journal so far.

    Raises:
        ConfigError: The server's data sets differ in their classes.
    """
    reads_labels = algorithm.reads_labels or plan.evaluation.devices_every > 0
    reads = reads_labels and plan.objective.kind == "classification"
    test, labelled = examples
    classes = load_class_names(plan, test, labelled, records)
    needs = frozenset({OBJECTIVE} if plan.task_objective else ())
    needs |= {ADAPTATION} if plan.adaptation else frozenset()
    needs |= {NORMALISE} if is_federated(plan) else frozenset()
    needs |= {PLUGINS} if task_plugins(plan) else frozenset()
    needs |= {STEP_FIELD + name for name in plan.hyper.step.features}
    return Membership(classes=classes, reads_labels=reads, inputs=load_run_inputs(plan, records), needs=needs)


async def _run_and_leave(rounds: Rounds, begun: RunOpened) -> State:
    """Run the remaining rounds, then announce the end to the other sites."""
    await _record_beginning(rounds, begun)
    state = await _run_rounds(rounds, partial(_resume, rounds, begun.draw))
    if rounds.neighbours:
        await rounds.neighbours.leave()
    return state


def _site_plan(begun: RunOpened, site: str) -> Plan:
    """Return the plan that the run began with, as this site runs it."""
    return plan_of_site(set_batches(begun.plan, begun.statistics_batches), site)


async def _load_server_examples(
    plan: Plan, server: Server, measured: Inputs = UNMEASURED
) -> tuple[Examples | None, Examples | None]:
    """Load the server's test data and its own training data, normalised as devices normalise theirs."""
    sections = (test_data(plan) if plan.evaluation.every else None, plan.server_data)
    normalised = [with_moments(data, measured.mean, measured.std) if data else None for data in sections]
    test, labelled = [await server.worker(load, data) if data else None for data in normalised]
    return test, labelled


async def _record_beginning(rounds: Rounds, begun: RunOpened) -> None:
    """Record the beginning of a new run."""
    if not rounds.run.store.records():
        require_journal(rounds.run.store.folder)
        await rounds.run.record(begun)
        if rounds.run.plan.adaptation:
            what = await rounds.run.server.worker(describe_trained, rounds.run.plan)
            log.info("%s", what)
            await rounds.run.record(Noted(what=what))


async def _resume(rounds: Rounds, draw: str) -> Resumption:
    """Return the position at which a run continues."""
    run, plan, algorithm = rounds.run, rounds.run.plan, rounds.run.algorithm
    split = algorithm.split is not None
    return await run.persist(
        resume, run.store, lambda: algorithm.init(initial_network(plan, draw), plan.seed), split=split
    )


def _require_examples(rounds: Rounds, tree: Tree) -> None:
    """Refuse server data that the network or algorithm cannot take, before any task is sent."""
    for examples, source in ((rounds.test, ""), (rounds.labelled, "server_data")):
        if examples is not None:
            require_matching_examples(rounds.run.model.layers, tree, examples, source, rounds.run.model.objective)
    server, labelled = rounds.run.algorithm.server, rounds.labelled
    if server and server.check and labelled is not None:
        server.check(rounds.run.model, (labelled.inputs, labelled.labels), rounds.run.plan.hyper_of(1))


async def _run_rounds(rounds: Rounds, stand: Callable[[], Awaitable[Resumption]]) -> State:
    """Run the remaining rounds from the position that `stand` returns."""
    plan, store = rounds.run.plan, rounds.run.store
    at = await stand()
    state = at.state
    _require_examples(rounds, evaluated_parameters(rounds.run.algorithm, rounds.run.model, state))
    records, ledger = store.records(), Ledger()
    if first(records, RunClosed):
        log.info("run %s has already ended", rounds.run.name)
        return state
    async with _observe(rounds, records), _record_costs(rounds, records) as costs:
        await _measure_on_devices(rounds, state, records)
        restore_membership(rounds, records)
        repetition = Repetition(rounds, is_live(records), costs.repeat)
        closed_last = list(valid_records(records, RoundClosed))[-1:]
        following = at.number if at.open_round else await repetition.after(closed_last, at.number)
        open_round, accepted = at.open_round, at.accepted
        del at  # free its state
        while not isinstance(following, RunClosed) and following <= plan.rounds:
            if end := None if open_round else await _finish_round(rounds, state, ledger, following - 1):
                following = end
                break
            already_s = await _elapsed_s(rounds, open_round) if open_round else repetition.pause_s
            try:
                state, closed = await rounds.run_round(following, state, open_round, accepted, already_s=already_s)
            except Infeasible as error:
                following = RunClosed(outcome="stopped", cause=str(error))
                break
            open_round, accepted = None, {}
            log.info("%s", _format_round(rounds, closed))
            await exclude_broken(rounds, closed)
            following = await repetition.after([closed], following + 1)
            if repetition.is_behind:
                state, repetition.is_behind = (await stand()).state, False
        end = following if isinstance(following, RunClosed) else RunClosed(outcome="finished")
        await _conclude(rounds, state, costs, end, ledger)
        await _record_doubts(rounds, ledger)
    if end.cause:
        how = "is over" if end.outcome == "finished" else "ends short"
        log.warning("run %s %s: %s", rounds.run.name, how, end.cause)
    await rounds.run.record(end)
    await rounds.run.server.worker(prune_updates, store.updates, ())  # all of them are in the model
    return state


async def _conclude(rounds: Rounds, state: State, costs: Costs, end: RunClosed, ledger: Ledger) -> None:
    """Wait for the last round's costs, and evaluate on devices if due."""
    await rounds.run.server.worker(ledger.take, rounds.run.store.records(ledger.seen))
    for closed in closed_rounds(rounds.run.store.records())[-1:]:
        fleet = rounds.run.server.fleet
        await costs.wait_recorded(closed.round, set(closed.arrived) & set(fleet.online) & set(fleet.reports))
    if end.outcome == "finished":
        await evaluate.evaluate_due(rounds, state)


async def _finish_round(rounds: Rounds, state: State, ledger: Ledger, after: int) -> RunClosed | None:
    """Do the work due after a round; return the run's end, None if it continues."""
    await evaluate.evaluate_due(rounds, state, after)
    if over := await _describe_reached_target(rounds, after) or await reason_to_end(rounds, state):
        return RunClosed(outcome="finished", cause=over)
    cause = await _check_budget(rounds, ledger)
    return RunClosed(outcome="stopped", cause=cause) if cause else None


async def _describe_reached_target(rounds: Rounds, after: int) -> str:
    """Return the plan's target value if a round's model reached it on the server's test data; empty otherwise."""
    task = rounds.run.plan.task
    if task is msgspec.UNSET or task.target.value is msgspec.UNSET:
        return ""
    metric, target = record_metric(rounds.run.model.objective) or ACCURACY, task.target.value
    for value, number in (await rounds.run.server.worker(measured_rounds, rounds.run.store.records()))[-1:]:
        if number == after and metric.reaches(value, target):
            return f"task.target: {metric.name} is {metric.format(value)} after round {number}, the target {target:g}"
    return ""


async def _elapsed_s(rounds: Rounds, open_round: RoundOpened) -> float:
    """Return the seconds since an earlier process opened a round, and record how precise they are."""
    records, now = rounds.run.store.records(), rounds.run.server.clock()
    elapsed = await rounds.run.server.worker(run_clock.elapsed_since, records, open_round, now)
    precision = (
        "by the calendar" if elapsed.is_known else "as far as is known: the calendar does not tell how long it was away"
    )
    since = f"its seconds count from its opening, {precision}"
    what = f"round {open_round.round} went on after a restart of the server: {since}"
    if elapsed.away_s >= 1:
        what += f"; up to {elapsed.away_s:.0f} of them it was away, and nobody worked on the round"
    await rounds.run.record(Noted(what=what, reason=SERVER_RESTARTED))
    return elapsed.seconds


async def _check_budget(rounds: Rounds, ledger: Ledger) -> str:
    """Return the exhausted budget, empty if another round may begin; exclude devices that report no energy."""
    budget, membership, fleet = rounds.run.plan.budget, rounds.run.membership, rounds.run.server.fleet
    if budget == BudgetPlan():
        return ""
    await _record_doubts(rounds, ledger)
    spending = ledger.spending()
    if budget.joules is not None:
        membership.unmetered = frozenset(spending.unmetered)
    if membership.list_online(fleet) and not membership.list_ready(fleet):
        dark = ", ".join(membership.list_online(fleet)[:8])
        return f"budget.joules: no device reports energy ({dark}); add power meters, or remove the budget"
    return describe_spent_budget(budget, spending)


async def _record_doubts(rounds: Rounds, ledger: Ledger) -> None:
    """Record each device whose energy claims are implausible, once, from the journal's new records."""
    await rounds.run.server.worker(ledger.take, rounds.run.store.records(ledger.seen))
    for note in ledger.doubts()[:MOST_NAMED]:
        log.warning("%s", note.what)
        await rounds.run.record(note)


@asynccontextmanager
async def _observe(rounds: Rounds, records: Sequence[AnyRecord]) -> AsyncIterator[None]:
    """Record presence and reports of devices during the block."""
    server, store = rounds.run.server, rounds.run.store
    now_utc_s = utc_seconds() if is_live(store.records()) else None
    await rounds.run.persist(
        store.append, run_clock.server_began(records, at=server.clock(), utc_s=now_utc_s, versions=read_versions())
    )
    observer = Observer(server.clock, lambda batch: server.worker(store.extend, batch))
    membership = rounds.run.membership

    def presence(status: Status) -> None:
        if membership.takes(status.device):
            observer.record_status(status)

    def report(report: Report) -> None:
        if membership.takes(report.device):
            observer.record_report(report)

    observer.begin(records, select_devices(server.fleet, membership.takes))
    server.presence.status_listeners.append(presence)
    server.presence.report_listeners.append(report)
    try:
        async with background(observer.write_batches()):
            rounds.flush_observations = observer.flush
            yield
            await observer.flush()
    finally:
        server.presence.status_listeners.remove(presence)
        server.presence.report_listeners.remove(report)


@asynccontextmanager
async def _record_costs(rounds: Rounds, records: Sequence[AnyRecord]) -> AsyncIterator[Costs]:
    """Record the task costs that devices report during the block."""
    costs = Costs(
        rounds.run.name,
        rounds.run.plan.rounds,
        lambda batch: rounds.run.persist(rounds.run.store.extend, batch),
    )
    costs.recall(records)
    for report in rounds.run.server.fleet.reports.values():
        costs.hear(report)
    rounds.run.server.presence.report_listeners.append(costs.hear)
    try:
        async with background(costs.keep()):
            yield costs
    finally:
        rounds.run.server.presence.report_listeners.remove(costs.hear)


def is_live(records: Sequence[AnyRecord]) -> bool:
    """Return true if a run has real devices, that is, began at a calendar time."""
    return bool((opening := first(records, RunOpened)) and opening.started)


def _find_beginning(records: Sequence[AnyRecord], plan: Plan) -> RunOpened | None:
    begun = first(records, RunOpened)
    if begun and not is_same_plan(begun.plan, plan):
        others = describe_differences(begun.plan, plan)
        raise ConfigError(
            f"run: {begun.run!r} was begun with another plan ({others}); name another run, or restore its plan"
        )
    return begun


async def _measure_on_devices(rounds: Rounds, state: State, records: Sequence[AnyRecord]) -> None:
    """Let devices time training steps and sum their inputs before the first decision, if the plan asks for it."""
    plan = rounds.run.plan
    if first(records, Measured):
        await _normalise(rounds, find_measured(records))
        return
    if not plan.measure.seconds and not is_federated(plan):
        return
    assignments = (await rounds.assigner.assign_tasks(state, 0, "measure")).assignments
    assignments = request_sums(assignments) if is_federated(plan) else assignments
    gather = await rounds.exchange.perform(0, state, assignments, accepted={}, purpose="measure")
    updates = {device: record.update for device, record in sorted(gather.accepted.items())}
    for device, cause in gather.failed.items():
        log.warning("device %s did not measure: %s", device, cause)
    inputs = fold_sums(updates, gather.failed) if is_federated(plan) else msgspec.UNSET
    measured = Measured(
        by_device={device: update.step for device, update in updates.items() if update.step},
        metrics={device: update.metrics for device, update in updates.items() if update.metrics},
        failed=gather.failed,
        inputs=inputs,
    )
    await rounds.run.record(measured)
    await _normalise(rounds, inputs or None)


async def _normalise(rounds: Rounds, measured: Inputs | None) -> None:
    """Use a measured mean and deviation for the tasks of devices and the server's own examples."""
    if measured is None:
        return
    rounds.run.membership.inputs = add_moments(rounds.run.membership.inputs, measured)
    rounds.test, rounds.labelled = await _load_server_examples(rounds.run.plan, rounds.run.server, measured)


def _format_round(rounds: Rounds, closed: RoundClosed) -> str:
    metric = record_metric(rounds.run.model.objective) or ACCURACY
    value = server_value(closed, metric)
    figure = "" if value is None else f" {metric.name}={metric.format(value)}"
    loss = "" if closed.loss is None else f" loss={closed.loss:.4f}"
    refused = f" refused={sum(closed.refused.values())}" if closed.refused else ""
    failed = f" failed={len(closed.failed)}: {frequent_cause(closed.failed)}" if closed.failed else ""
    return (
        f"round={closed.round}/{rounds.run.plan.rounds} run={rounds.run.name} {closed.outcome} "
        f"updates={len(closed.arrived)}{figure}{loss} seconds={closed.seconds:.3f}{refused}{failed}"
    )
